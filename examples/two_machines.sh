#!/bin/sh
# Trains one run on two machines: the first half of the model on one, the second half on the other.
#   on host1:            examples/two_machines.sh 0 host1 run.yaml
#   on the other one:    examples/two_machines.sh 1 host1 run.yaml
# Both need the YAML file, the base model and this Python environment; only host1 reads the data and writes output_dir.
# More arguments go to `mlora train`. Port 29500 of host1 must be open to the other machine, and ports that the
# systems choose must be open in both directions. docs/pipeline.md says more.
set -eu
: "${3:?usage: two_machines.sh RANK HOST1 RUN.yaml [options of mlora train]}"
rank=$1 host1=$2 run=$3
shift 3
exec torchrun --nnodes 2 --node-rank "$rank" --nproc-per-node 1 --master-addr "$host1" --master-port 29500 \
  --no-python mlora train "$run" --stages 2 "$@"
