"""The operator whose frozen products have the low-rank part inside, in the emulator."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import emulated
import pytest
import torch
from backends import serving
from cases import Case, assert_right, make

import mlora_ext as mx
from mlora_ext.backends import gpu_base_gemm, run
from mlora_ext.backends.gpu_base_gemm import CUBLAS, USUAL, WAYS, GpuBaseGemm, Shape, Way
from mlora_ext.backends.interface import Layer
from mlora_ext.backends.selection import gpu_operator
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.ops.functional import lora_linear_fused

EMULATED = pytest.mark.parametrize("backend", ["cuda with own products"], indirect=True)
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(
    params=["cuda with own products", pytest.param("cuda with own products on a GPU", marks=pytest.mark.gpu)],
    autouse=True,
)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All memory that PyTorch hands out is full of NaN."""
    torch.use_deterministic_algorithms(True)
    with serving(request.param, monkeypatch):
        yield


def launches_of(run: Callable[[], object]) -> list[str]:
    with emulated.watched() as launches:
        run()
    return [launch.name for launch in launches]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("ranks", [[1, 4, 3], [16, 8, 40], [130, 17, 64]], ids=str)
@pytest.mark.parametrize("p", [None, [0.3, 0.0, 0.5]], ids=str)
def test_values(dtype: torch.dtype, ranks: list[int], p: list[float] | None) -> None:
    """Segments that begin anywhere, rows without an adapter, several quarters and column tiles."""
    lengths, adapters = [70, 1, 59, 9, 3, 130], [1, 0, 0, -1, 2, 0]
    for adapter_dtype in (dtype, torch.float32):
        how = {"dtype": dtype, "adapter_dtype": adapter_dtype, "d_in": 328, "d_out": 648, "p": p}
        assert_right(make(ranks, lengths, adapters, **how))


def test_stored_masks(saved_masks: None) -> None:
    assert_right(make([8, 20], [130, 61], [1, 0], dtype=torch.bfloat16, d_in=136, d_out=72, p=[0.3, 0.0]))


@EMULATED
def test_contiguous_b_and_strided_rows() -> None:
    case = make([4, 24], [90, 60], [0, 1], dtype=torch.bfloat16, d_in=72, d_out=80, p=0.2)
    case.lora_b = [b.detach().contiguous().requires_grad_() for b in case.lora_b]
    case.x = torch.randn(150, 88).to(case.x.dtype)[:, 8:80].requires_grad_()
    assert launches_of(lambda: assert_right(case)).count("product") == 2


@EMULATED
def test_launches() -> None:
    """No more than with cuBLAS, whatever the adapters."""
    for adapters in (1, 40):
        case = make([4] * adapters, [3] * adapters, list(range(adapters)), dtype=torch.bfloat16, p=0.1)
        assert launches_of(case.run) == [
            "plan", "parts", "shrink", "page", "product", "read_dy", "page", "read_x", "product",
        ]  # fmt: skip


@EMULATED
def test_one_layout_with_both_libraries() -> None:
    """Its plan is kept, and own products need more of it."""
    case = make([8, 4], [70, 30], [0, 1], dtype=torch.bfloat16)
    for library in ("cublas", "mlora", "cublas"):
        mx.use_gpu_base_gemm(library)
        launches = launches_of(lambda: assert_right(case))
        assert ("product" in launches, "parts" in launches) == (library == "mlora",) * 2


def results_of(case: Case, layers: list[Layer], dys: list[torch.Tensor]) -> list[torch.Tensor]:
    """y of layers that share x, dx, and the gradients."""
    x, _, _, lora_a, lora_b, *plan, _ = case.operator_arguments()
    count = len(layers)
    plan = (*plan, torch.arange(count))
    every_b = [b[: len(layer.weight)] for layer in layers for b in lora_b]
    with torch.no_grad():
        ys, saved = run.forward("cuda", x, layers, lora_a * count, every_b, plan)
        dx, da, db = run.backward(
            "cuda", dys, x, layers, lora_a * count, every_b, saved, plan, (True, True, True)
        )
    return [*ys, dx, *da, *db]


@pytest.mark.parametrize("masks", ["drawn", "stored"])
def test_layers_that_share_x(masks: str, request: pytest.FixtureRequest) -> None:
    """dx is the sum of the layers' own, rounded after each; all else has the bits of a layer alone."""
    if masks == "stored":
        request.getfixturevalue("saved_masks")
    case = make([8, 40], [130, 61], [1, 0], dtype=torch.bfloat16, d_in=136, d_out=328, p=0.3)
    x, weight, bias, lora_a, lora_b, *plan, _ = case.operator_arguments()
    weights = [weight, weight[:72], weight[:264]]
    layers = [
        Layer(PlainWeight.of(one), one, None if i == 1 else bias[: len(one)]) for i, one in enumerate(weights)
    ]
    dys = [case.dy[:, : len(one)].contiguous() for one in weights]
    together = results_of(case, layers, dys)
    dx = torch.zeros_like(x)
    for i, (layer, dy) in enumerate(zip(layers, dys, strict=True)):
        every_b = [b[: len(layer.weight)] for b in lora_b]
        own = (*plan, torch.tensor([i]))
        with torch.no_grad():
            (y,), saved = run.forward("cuda", x, [layer], lora_a, every_b, own)
            own_dx, da, db = run.backward(
                "cuda", [dy], x, [layer], lora_a, every_b, saved, own, (True, True, True)
            )
        dx += own_dx
        first = 4 + 2 * i
        found = [together[i], *together[first : first + 2], *together[first + 6 : first + 8]]
        assert all(map(torch.equal, found, [y, *da, *db]))
    assert torch.equal(together[3], dx)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=str
)
def test_only_wanted_gradients(wanted: tuple[bool, bool, bool]) -> None:
    case = make([5, 16], [37, 61], [0, 1], dtype=torch.bfloat16, p=0.2)
    x, weight, bias, lora_a, lora_b, *plan = case.operator_arguments()
    layers = [Layer(PlainWeight.of(weight), weight, bias)]

    def gradients(wanted: tuple[bool, bool, bool]) -> list:
        with torch.no_grad():
            _, saved = run.forward("cuda", x, layers, lora_a, lora_b, tuple(plan))
            dx, da, db = run.backward(
                "cuda", [case.dy], x, layers, lora_a, lora_b, saved, tuple(plan), wanted
            )
        return [[] if dx is None else [dx], da, db]

    every = gradients((True, True, True))
    for found, expected, asked in zip(gradients(wanted), every, wanted, strict=True):
        assert len(found) == (len(expected) if asked else 0)
        assert all(map(torch.equal, found, expected))


def test_da_beside_dx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits again and again, on a stream of its own and in order."""
    case = make([8, 40], [700, 500], [0, 1], dtype=torch.bfloat16, d_in=264, d_out=520, p=0.1)
    choice, results = gpu_operator("cuda").base_gemm, []
    for left in (0, 4, 16, 4, 0):
        monkeypatch.setattr(choice, "way", lambda *_, left=left: Way(4, left))
        results.append(case.run())
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


@pytest.mark.parametrize("library", ["cublas", "mlora"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_without_the_layer_of_the_largest_rank(dtype: torch.dtype, library: str) -> None:
    """Of three that share x, whose y is not used: s of the others is narrower than that of all."""
    mx.use_gpu_base_gemm(library)
    case = make([8, 5], [70, 30], [0, 1], dtype=dtype)
    wide = make([72, 40], [1, 1], [0, 1], dtype=dtype)
    x, weight, _, lora_a, lora_b, *plan, _ = case.operator_arguments()
    frozen = PlainWeight.of(weight)
    narrow, plan = (lora_a, lora_b), (*plan[:2], None, None, None)
    found = []
    for some in ([narrow, (wide.lora_a, wide.lora_b), narrow], [narrow, narrow]):
        a, b = ([matrix for layer in some for matrix in layer[side]] for side in (0, 1))
        ys = lora_linear_fused(x, [frozen] * len(some), [None] * len(some), a, b, plan)
        found.append(torch.autograd.grad([ys[0], ys[-1]], [x, *lora_a, *lora_b], [case.dy] * 2))
    assert all(map(torch.equal, *found))


def odd_width(case: Case) -> None:
    case.weight, case.bias, case.dy = case.weight[:23], case.bias[:23], case.dy[:, :23].contiguous()
    case.lora_b = [b.detach()[:23].requires_grad_() for b in case.lora_b]


def transposed_weight(case: Case) -> None:
    case.weight = case.weight.t().contiguous().t()


def odd_addresses(case: Case) -> None:
    case.x = torch.randn(1 + 98 * 40).to(case.x.dtype)[1:].view(98, 40).requires_grad_()
    case.dy = torch.randn(1 + 98 * 24).to(case.x.dtype)[1:].view(98, 24)


@EMULATED
@pytest.mark.parametrize("change", [odd_width, transposed_weight, odd_addresses])
def test_what_is_not_served_goes_the_other_way(change: Callable[[Case], None]) -> None:
    case = make([5, 16], [37, 61], [0, 1], dtype=torch.bfloat16, p=0.2)
    change(case)
    assert launches_of(lambda: assert_right(case)) == [
        "plan", "parts", "shrink", "expand", "read_dy", "read_x",
    ]  # fmt: skip
    single = make([5, 16], [37, 61], [0, 1], p=0.2)
    assert "product" not in launches_of(lambda: assert_right(single))


def test_nan_stays_with_its_adapter() -> None:
    case = make([8, 40, 16], [70, 95, 135], [0, 1, 2], dtype=torch.bfloat16, d_in=136, d_out=264, p=0.1)
    clean = case.run()
    with torch.no_grad():
        case.lora_a[1].fill_(torch.nan)
        case.lora_b[1].fill_(torch.nan)
    dirty, others = case.run(), torch.ones(300, dtype=torch.bool)
    others[70:165] = False
    for i, (one, other) in enumerate(zip(dirty, clean, strict=True)):
        if i < 2:
            assert torch.equal(one[others], other[others])
            assert one[~others].isnan().any(1).all()
        else:
            assert torch.equal(one, other) is (i not in (3, 6))


# --- the choice


def shape_of(direction: str, rows: int, d_in: int, d_out: int) -> Shape:
    return Shape(direction, "bfloat16", rows, d_in, d_out)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda with own products on a GPU"], indirect=True)
def test_a_shape_is_measured_on_a_gpu() -> None:
    choice = gpu_operator("cuda").base_gemm
    shapes = [shape_of(direction, 512, 256, 128) for direction in ("forward", "backward")]
    choice.measure(shapes, torch.device("cuda"))
    for shape in shapes:
        assert set(choice.times[shape]) == {*WAYS[shape.direction]}
        assert all(0 < seconds < 1 for seconds in choice.times[shape].values())


@EMULATED
@pytest.mark.parametrize("stride", [0, 8, 40])
def test_rows_that_overlap_are_not_served(stride: int) -> None:
    """As of a gradient that was expanded; 40 columns."""
    case = make([8, 4], [70, 30], [0, 1], dtype=torch.bfloat16)
    x, weight, bias, lora_a, lora_b, *plan, _ = case.operator_arguments()
    x = torch.as_strided(torch.randn(8000).to(x.dtype), x.shape, (stride, 1))
    layer = Layer(PlainWeight.of(weight), weight, bias)
    with torch.no_grad():
        forward = lambda: run.forward("cuda", x, [layer], lora_a, lora_b, (*plan, None))[0]  # noqa: E731
        assert ("product" in launches_of(forward)) == (stride == 40)
        (y,) = forward()
        (expected,) = run.forward("cuda", x.clone(), [layer], lora_a, lora_b, (*plan, None))[0]
    assert (y - expected).abs().max() <= 0.02 * expected.abs().max()


@EMULATED
def test_a_page_that_would_be_mostly_padding_is_not_made() -> None:
    """Of 17 adapters: 16 of rank 1, and one of rank 256."""
    case = make([1] * 16 + [256], [1], [16], dtype=torch.bfloat16, d_in=8, d_out=32768)
    x, weight, _, lora_a, lora_b, *plan, _ = case.operator_arguments()
    layer = Layer(PlainWeight.of(weight), weight)
    with torch.no_grad():
        names = launches_of(lambda: run.forward("cuda", x, [layer], lora_a, lora_b, (*plan, None)))
    assert "expand" in names
    assert "page" not in names


@EMULATED
@pytest.mark.parametrize("mode", ["inference", "default dtype"])
def test_measuring_in_any_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = gpu_operator("cuda").base_gemm
    monkeypatch.setattr(gpu_base_gemm, "_best", lambda ways, run, device: {way: run(way) for way in ways})
    shape = shape_of("backward", 200, 72, 40)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64 if mode == "default dtype" else before)
        with torch.inference_mode(mode == "inference"):
            found = choice._measured(shape, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert set(found) == {*WAYS["backward"]}


@EMULATED
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_trial_runs_every_candidate(direction: str) -> None:
    run = gpu_operator("cuda")._trial(shape_of(direction, 200, 72, 40), torch.device("cpu"))
    state = torch.get_rng_state()
    names = {way: launches_of(lambda way=way: run(way)) for way in WAYS[direction]}
    assert all(gpu_base_gemm._agrees(run, way, run(CUBLAS)) for way in WAYS[direction])
    assert all(("product" in launches) is (way != CUBLAS) for way, launches in names.items())
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are as before"


class OnAGPU(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


@EMULATED
def test_the_faster_of_all_layers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    capturing, asked = False, []
    times = {
        (4096, 4096): {CUBLAS: 3.0, Way(4): 2.5, Way(8, 4): 2.0, Way(16): 2.1},
        (4096, 1024): {CUBLAS: 1.0, Way(4): 1.9, Way(8, 4): 1.8, Way(16): 1.2},
        (4096, 512): {CUBLAS: 0.0},  # own ones did not fit into memory
    }
    choice = GpuBaseGemm(lambda shape, device: asked.append(shape) or (lambda way: None))
    choice.library = "fastest"
    monkeypatch.setattr(gpu_base_gemm, "_best", lambda ways, run, device: times[asked[-1][3:]])

    def way(rows: int, *outs: int, direction: str = "forward") -> Way:
        x = torch.empty(rows, 4096, dtype=torch.bfloat16).as_subclass(OnAGPU)
        return choice.way(direction, x, [torch.empty(out, 4096, dtype=x.dtype) for out in outs])

    assert way(gpu_base_gemm.FEWEST_ROWS - 1, 4096) == CUBLAS
    assert not asked
    capturing = True
    assert way(3000, 4096) == CUBLAS
    assert not asked, "a capture measures nothing"
    capturing = False
    assert way(3000, 4096) == Way(8, 4)
    assert way(3000, 4096, 1024) == Way(16), "3.3 in place of 4.0 or 3.8"
    assert way(3000, 4096, 1024, 1024) == Way(16), "4.5 in place of 5.0"
    assert way(3000, 1024) == CUBLAS
    assert way(3000, 4096, 512) == CUBLAS
    assert asked == [shape_of("forward", 4096, 4096, out) for out in (4096, 1024, 512)], "each once"
    assert way(4096, 4096) == Way(8, 4)
    assert len(asked) == 3
    assert way(40000, 4096, direction="backward") == Way(8, 4)
    assert asked[-1] == shape_of("backward", gpu_base_gemm.MOST_ROWS, 4096, 4096)
    choice.library = "cublas"
    assert way(3000, 4096) == CUBLAS
    choice.library = "mlora"
    assert way(9, 1024) == USUAL


@EMULATED
def test_a_wrong_product_is_not_taken() -> None:
    want = torch.randn(4, 8).bfloat16()
    for wrong in (want.roll(1, 0), want.clone().index_fill_(1, torch.tensor([3]), torch.nan)):
        with pytest.warns(UserWarning, match="is wrong on this GPU, so cuBLAS makes it"):
            assert not gpu_base_gemm._agrees(lambda way, wrong=wrong: wrong, USUAL, want)

    def fail(way: Way) -> torch.Tensor:
        raise RuntimeError("product: CUDA error 1")

    with pytest.warns(UserWarning, match=r"fails \(product: CUDA error 1\) on this GPU, so cuBLAS makes it"):
        assert not gpu_base_gemm._agrees(fail, USUAL, want)


@EMULATED
def test_shapes_that_are_measured() -> None:
    weights = [torch.empty(16, 8, dtype=torch.bfloat16)] * 2
    weights += [torch.empty(16, 8), torch.empty(16, 9, dtype=torch.float16)]
    weights.append(torch.empty(8, 16, dtype=torch.float16).t())
    found = gpu_base_gemm.shapes_of(weights)
    assert {shape[1:2] + shape[3:] for shape in found} == {("bfloat16", 8, 16)}
    rows = [512, 1024, 2048, 4096, 8192, 16384]
    assert [shape.rows for shape in found] == rows * 2
    assert {shape.direction for shape in found} == {"forward", "backward"}


@EMULATED
def test_what_was_measured_can_be_learnt() -> None:
    first, other = (GpuBaseGemm(lambda shape, device: lambda way: None) for _ in range(2))
    first.times = {shape_of("forward", 512, 64, 32): {CUBLAS: 1.0, Way(4): 0.9}}
    first.times[no_room := shape_of("forward", 512, 64, 8)] = {CUBLAS: 0.0}
    first.times[asked := shape_of("forward", 512, 64, 16)] = {CUBLAS: 1.0}
    known = first.known({shape_of("forward", 512, 64, 32), no_room})
    other.learn(json.loads(json.dumps(known)))
    del first.times[no_room], first.times[asked]
    assert other.times == first.times
    (right,) = known
    for seconds in ({}, {"4,0": 1.0}, {"0,0": 1.0, "-3,0": 0.1}, {"0,0": float("nan")}):
        with pytest.raises(ValueError, match="expected records"):
            other.learn([right | {"seconds": seconds}])
    for damaged in ({}, {"direction": "forward"}, 3):
        with pytest.raises(ValueError, match="expected records"):
            other.learn([damaged])


@EMULATED
def test_a_library_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="base_gemm: expected cublas, mlora, fastest or None, got 'mkl'"):
        mx.use_gpu_base_gemm("mkl")
