"""How much memory a call takes."""

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def most_at_once(run: Callable[[], object]) -> int:
    """Returns the most bytes of tensors that a call holds at once beyond those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [one for one in found.profiler.kineto_results.events() if one.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))
