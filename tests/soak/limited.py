"""`mlora` under a limit on memory that is the same on every machine, see `tests.mlora.limited_runs`.

python limited.py ARGUMENTS...
"""

import pytest
from mlora.cli.app import main

from tests.mlora.limited_runs import replace_memory

if __name__ == "__main__":
    replace_memory(pytest.MonkeyPatch())
    main()
