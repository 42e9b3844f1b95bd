"""The choice of the slow tests that run before each change."""

from tests.cover import LEFT, left_out


def test_slow_tests_that_add_no_line_are_left_out() -> None:
    lines = {"quick": {1, 2}, "dear": {1, 3, 4}, "cheap": {3, 4}, "more": {4, 5}, "none": {2, 4}}
    seconds = {"quick": 0.1, "dear": 9.0, "cheap": 1.0, "more": 2.0, "none": 1.0, "unseen": 3.0}
    assert left_out(lines, seconds) == ["dear", "none", "unseen"]


def test_each_function_that_tests_kernels_has_a_part() -> None:
    slow = {f"tests/cuda/test_x.py::test_{name}[{value}]": value + 1.0 for name in "ab" for value in range(3)}
    assert left_out({}, slow) == [test for test in sorted(slow) if "[0]" not in test]


def test_files_of_tests_that_are_left_out_exist() -> None:
    files = {line.partition("::")[0] for line in LEFT.read_text(encoding="utf-8").splitlines()}
    assert files
    assert all((LEFT.parent.parent / file).is_file() for file in files)
