"""What admission sets aside for the requests that run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.growth import GrowthEstimate
from scheduler.request import Request
from tests.scheduler.oracle import message


@given(
    page_size=st.sampled_from([1, 4, 16]),
    mean=st.floats(0.0, 300.0),
    retractions=st.integers(0, 4),
    sizes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(1, 80), st.integers(0, 1), st.integers(0, 12)),
        max_size=5,
    ),
)
def test_pages_are_those_of_the_tokens_that_each_request_will_probably_have(
    page_size: int, mean: float, retractions: int, sizes: list[tuple[int, int, int, int, int]]
) -> None:
    growth = GrowthEstimate()
    growth.mean_tokens = mean
    for _ in range(retractions):
        growth.retracted()
    requests = []
    expected = 0
    for prompt, outputs, left, promised, pages in sizes:
        request = Request(message("r", [7] * prompt, None), 0.0, 1, outputs + left, frozenset())
        request.tokens.extend([8] * outputs)
        request.promised = promised
        request.table.extend(range(pages))
        requests.append(request)
        tokens = prompt + outputs + promised + growth.tokens(request, page_size)
        expected += max(0, -(-tokens // page_size) - pages)
    assert growth.pages(requests, page_size) == expected
