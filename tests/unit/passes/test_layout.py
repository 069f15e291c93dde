import pytest
import torch

from gaverify.passes.layout import SampleLayout, layouts_of, taken


@pytest.mark.parametrize(
    ("full", "micro", "found"),
    [
        ((8, 3), (2, 3), [SampleLayout(0, 1)]),
        ((3, 8), (3, 2), [SampleLayout(1, 1)]),
        ((24, 3), (6, 3), [SampleLayout(0, 3)]),
        ((8, 8), (2, 2), [SampleLayout(0, 1), SampleLayout(1, 1)]),
        ((8, 7), (2, 5), [SampleLayout(0, 1), SampleLayout(1, 0)]),
        ((24, 3), (5, 3), [SampleLayout(0, 0)]),
        ((4, 3), (4, 3), []),
        ((8, 3), (2,), None),
    ],
)
def test_the_dimension_of_the_samples_is_found(
    full: tuple[int, ...], micro: tuple[int, ...], found: list[SampleLayout] | None
) -> None:
    assert layouts_of(full, micro, batch_size=8, count=2) == found


def test_samples_are_the_outer_or_the_inner_index_of_a_folded_dimension() -> None:
    sample = torch.arange(4)
    layout = SampleLayout(1, fold=2)
    outer, inner = sample.repeat_interleave(2)[None], sample.repeat(2)[None]
    assert taken(outer, layout, 1, 3, batch_size=4).tolist() == [[1, 1, 2, 2]]
    assert taken(inner, layout.inside, 1, 3, batch_size=4).tolist() == [[1, 2, 1, 2]]
