import pytest
import torch
from torch import nn

from gaverify.passes.precision import buffers_differ, converted, dtype_like, short_name, unit_roundoff


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_plus_a_unit_roundoff_rounds_to_one_and_a_little_more_does_not(dtype: torch.dtype) -> None:
    u = unit_roundoff(dtype)
    one = torch.ones((), dtype=dtype)
    assert torch.tensor(1.0 + u, dtype=torch.float64).to(dtype) == one
    assert torch.tensor(1.0 + 1.01 * u, dtype=torch.float64).to(dtype) > one
    assert short_name(dtype) == str(dtype).split(".")[1]


@pytest.mark.parametrize(
    ("current", "wanted", "result"),
    [
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float64, torch.float64),
        (torch.complex64, torch.float64, torch.complex128),
        (torch.complex128, torch.bfloat16, torch.complex64),
        (torch.int64, torch.float64, torch.int64),
        (torch.bool, torch.float64, torch.bool),
        (torch.float32, None, torch.float32),
    ],
)
def test_what_a_dtype_becomes(current: torch.dtype, wanted: torch.dtype | None, result: torch.dtype) -> None:
    assert dtype_like(current, wanted) is result


def test_a_model_is_converted_in_place_and_comes_back_bit_for_bit() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight  # tied
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = [(parameter, parameter.data_ptr()) for parameter in model.parameters()]
    with converted([model], dtype=torch.float64):
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert model[1].num_batches_tracked.dtype is torch.int64
        assert model[2].weight is model[0].weight
        model(torch.randn(4, 3, dtype=torch.float64)).sum().backward()
        with torch.no_grad():
            model[0].weight.mul_(2)
    for parameter, pointer in parameters:
        assert parameter.data_ptr() == pointer and parameter.dtype is torch.float32 and parameter.grad is None
    running = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for name, value in model.state_dict().items():
        if name not in running:
            assert torch.equal(value, before[name]), name
    assert torch.equal(model[1].running_mean, before["1.running_mean"])  # the converted copy was updated


def test_a_model_comes_back_when_the_code_inside_raises() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError), converted([model], dtype=torch.float64):
        raise ValueError
    assert model.weight.dtype is torch.float32


def test_what_needs_no_conversion_is_not_touched() -> None:
    model = nn.Linear(2, 2)
    gradient = model.weight.grad = torch.ones(2, 2)
    with converted([model], dtype=torch.float32):
        assert model.weight.grad is gradient
    assert model.weight.grad is gradient


def test_buffers_differ_by_more_than_the_rounding_of_a_running_average() -> None:
    full, u = torch.ones(4), unit_roundoff(torch.float32)
    for units, differ in ((0, False), (32, False), (128, True)):
        assert buffers_differ(full * (1 + units * u), full, u) is differ
        assert not buffers_differ(full * (1 + units * u), full, unit_roundoff(torch.bfloat16))
    assert buffers_differ(full.to_sparse() * 2, full.to_sparse(), u)
    assert buffers_differ(full[:3], full, u) and not buffers_differ(torch.zeros(4), torch.zeros(4), u)
