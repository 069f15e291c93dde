import pytest
import torch

from gaverify.passes.sketches import SKETCH, sketch


def gradients(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_linear_relations_hold_exactly() -> None:
    a, b = gradients(0, (300, 40), (7,)), gradients(1, (300, 40), (7,))
    mixed = [2 * x - 3 * y for x, y in zip(a, b, strict=True)]
    torch.testing.assert_close(sketch(mixed), 2 * sketch(a) - 3 * sketch(b))


def test_the_elements_of_a_small_model_have_buckets_of_their_own() -> None:
    """Else a handful of weights could be explained by the collisions, and every fit would succeed."""
    small = gradients(0, (3, 4), (3,), (1, 3), (1,), (16, 8), (16,))
    numbers = torch.cat([tensor.reshape(-1) for tensor in small])
    found = sketch(small)
    assert int((found != 0).sum()) == numbers.numel()
    assert float(found.norm()) == pytest.approx(float(numbers.norm()))


def test_a_missing_gradient_changes_nothing_for_the_others() -> None:
    first, second = gradients(0, (5,), (6,))
    both, alone = sketch([first, second]), sketch([None, second])
    torch.testing.assert_close(both - sketch([first, None]), alone)
    assert sketch([None, None]).shape == (SKETCH,) and not sketch([None]).any()


def test_lengths_are_preserved_in_expectation() -> None:
    large = gradients(0, (400, 100), (50_000,))
    ratio = float(sketch(large).norm()) / float(torch.cat([t.reshape(-1) for t in large]).norm())
    assert 0.9 < ratio < 1.1


@pytest.mark.parametrize("layout", ["sparse", "complex", "half"])
def test_every_kind_of_gradient_is_sketched(layout: str) -> None:
    tensor = torch.randn(6, 3)
    if layout == "sparse":
        torch.testing.assert_close(sketch([tensor.to_sparse()]), sketch([tensor]))
    elif layout == "complex":
        assert int((sketch([torch.complex(tensor, tensor + 1)]) != 0).sum()) == 36
    else:
        torch.testing.assert_close(sketch([tensor.bfloat16()]), sketch([tensor]), rtol=0.01, atol=0.05)
