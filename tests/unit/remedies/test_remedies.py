"""The remedies do what the findings that name them promise, on models of every layout that they claim to handle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import cross_entropy, fault_codes, language_model, mlp, token_batch, token_loss
from torch import nn

import gaverify
from gaverify import Outcome, Problem, ProblemError
from gaverify.remedies import CachedGradients, convert_batch_norm, token_weights, valid_targets


def gradients(*modules: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]


def difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert len(actual) == len(expected) > 0
    squares = sum(float((a - e).double().square().sum()) for a, e in zip(actual, expected, strict=True))
    return (squares / sum(float(e.double().square().sum()) for e in expected)) ** 0.5


LENGTHS = (6, 2, 1, 3, 5, 6, 2, 4)


class TestTokenWeights:
    def test_repairs_a_mean_of_means(self) -> None:
        torch.manual_seed(0)
        problem = Problem(language_model(), token_loss, token_batch(LENGTHS))
        assert fault_codes(gaverify.verify(problem)) == {"GAV202"}
        assert gaverify.verify(problem, weighting=token_weights).outcome is Outcome.EQUIVALENT

    def test_shifted_targets(self) -> None:
        """The model drops the first label of each row, valid or not."""

        def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            logits = model(batch["tokens"])[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

        torch.manual_seed(0)
        problem = Problem(language_model(), loss, token_batch(LENGTHS))
        for shifted, outcome in ((False, Outcome.DIVERGENT), (True, Outcome.EQUIVALENT)):
            assert gaverify.verify(problem, weighting=partial(token_weights, shifted=shifted)).outcome is outcome

    def test_class_weights(self) -> None:
        weights = torch.tensor([0.2, 1.0, 2.0, 5.0])

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], weight=weights.to(batch[0].dtype))

        torch.manual_seed(0)
        problem = Problem(mlp(), loss, (torch.randn(16, 6), torch.tensor([0, 0, 1, 0] + [3, 2, 2, 3] * 3)))
        for given, outcome in ((None, Outcome.DIVERGENT), (weights, Outcome.EQUIVALENT)):
            assert gaverify.verify(problem, weighting=partial(token_weights, class_weights=given)).outcome is outcome

    @pytest.mark.parametrize("lengths", [LENGTHS, (6, 2, 0, 0, 5, 6, 2, 4)])
    def test_the_loop_of_its_docstring(self, lengths: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        model, batch = language_model().double(), token_batch(lengths)
        token_loss(model, batch).backward()
        expected = gradients(model)
        model.zero_grad()
        window = [{name: rows[start : start + 2] for name, rows in batch.items()} for start in range(0, 8, 2)]
        total = sum(valid_targets(micro_batch) for micro_batch in window)
        for micro_batch in window:
            share = valid_targets(micro_batch) / total
            assert share == token_weights(micro_batch, window) == token_weights(micro_batch, batch)
            if share > 0:
                (token_loss(model, micro_batch) * share).backward()
        assert difference(gradients(model), expected) < 1e-14

    def test_another_ignored_target(self) -> None:
        targets = torch.tensor([[1, 0, 0], [2, 3, 0]])
        assert valid_targets(targets, ignore_index=0) == 3
        assert token_weights(targets[:1], targets, ignore_index=0) == pytest.approx(1 / 3)

    def test_bad_input_gets_a_sentence(self) -> None:
        with pytest.raises(ProblemError, match="no valid target at all"):
            token_weights(torch.tensor([-100]), torch.tensor([-100, -100]))
        with pytest.raises(ProblemError, match="no integer targets"):
            valid_targets((torch.randn(3),))


NORMS = (
    (nn.BatchNorm1d(8), (16, 8)),
    (nn.BatchNorm1d(8), (16, 8, 5)),
    (nn.BatchNorm2d(8), (16, 8, 3, 3)),
    (nn.BatchNorm3d(8), (16, 8, 2, 2, 2)),
    (nn.SyncBatchNorm(8), (16, 8, 3)),
    (nn.BatchNorm2d(8, affine=False, eps=1e-3), (16, 8, 3, 3)),
)


class Ended(nn.Module):
    """A network whose only BatchNorm is `norm`, with a linear layer around it."""

    def __init__(self, norm: nn.Module, *shape: int) -> None:
        super().__init__()
        self.norm, self.head = norm, nn.Linear(torch.Size(shape[1:]).numel(), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x).tanh().flatten(1))


def trained(norm: nn.Module, shape: tuple[int, ...]) -> tuple[Ended, torch.Tensor]:
    """A network with statistics, scale and shift of its own, and a batch for it."""
    torch.manual_seed(0)
    model = Ended(copy.deepcopy(norm), *shape)
    layer, x = model.norm, torch.randn(shape)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    layer.num_batches_tracked.fill_(7)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return model, x


class TestConvertBatchNorm:
    @pytest.mark.parametrize(("norm", "shape"), NORMS)
    def test_makes_every_kind_equivalent_and_takes_over_what_it_can(
        self, norm: nn.Module, shape: tuple[int, ...]
    ) -> None:
        model, x = trained(norm, shape)
        batch = x, torch.randint(4, (len(x),))
        if not isinstance(norm, nn.SyncBatchNorm):  # which refuses to train on a CPU
            assert gaverify.verify(model, cross_entropy, batch, diagnose=False).outcome is Outcome.DIVERGENT
        converted = convert_batch_norm(model)
        assert gaverify.verify(converted, cross_entropy, batch).outcome is Outcome.EQUIVALENT
        layer = converted.norm
        assert isinstance(layer, nn.GroupNorm)
        assert (layer.num_groups, layer.eps, layer.affine) == (2, norm.eps, norm.affine)
        if norm.affine:
            assert torch.equal(layer.weight, model.norm.weight) and torch.equal(layer.bias, model.norm.bias)

    def test_the_model_itself_stays_as_it_is(self) -> None:
        model, _ = trained(*NORMS[0])
        before = copy.deepcopy(model.state_dict())
        converted = convert_batch_norm(model)
        assert type(model.norm) is nn.BatchNorm1d
        with torch.no_grad():
            converted.norm.weight.zero_()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_in_place_keeps_the_parameters(self) -> None:
        model, _ = trained(*NORMS[0])
        parameters = [id(parameter) for parameter in model.parameters()]
        assert convert_batch_norm(model, in_place=True) is model
        assert not isinstance(model.norm, nn.BatchNorm1d)
        assert [id(parameter) for parameter in model.parameters()] == parameters

    def test_a_layer_alone_or_shared(self) -> None:
        norm = nn.BatchNorm1d(8)
        assert isinstance(convert_batch_norm(norm), nn.GroupNorm)
        with pytest.raises(ProblemError, match="is a BatchNorm itself"):
            convert_batch_norm(norm, in_place=True)
        converted = convert_batch_norm(nn.Sequential(norm, nn.ReLU(), nn.Sequential(nn.Linear(8, 8), norm)))
        assert isinstance(converted[0], nn.GroupNorm) and converted[0] is converted[2][1]

    def test_mode_dtype_and_frozen_parameters_stay(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(8).double()).eval().requires_grad_(False)
        for converted in (convert_batch_norm(model), convert_batch_norm(model, groups=4)):
            assert not converted[0].training
            assert converted[0].weight.dtype is torch.float64 and not converted[0].weight.requires_grad

    def test_groups_of_several_channels(self) -> None:
        groups = {1: 1, 2: 1, 3: 1, 6: 1, 8: 2, 24: 6, 256: 32}
        assert {n: convert_batch_norm(nn.BatchNorm1d(n)).num_groups for n in groups} == groups

    def test_what_cannot_be_converted_is_named_and_nothing_is_changed(self) -> None:
        class Activated(nn.BatchNorm1d):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x).relu()

        model = nn.Sequential(nn.BatchNorm1d(8), Activated(8), nn.LazyBatchNorm1d(), nn.BatchNorm1d(6))
        with pytest.raises(ProblemError) as caught:
            convert_batch_norm(model, groups=4, in_place=True)
        lines = str(caught.value).splitlines()
        assert len(lines) == 3
        for line, part in zip(lines, ("`1` (Activated)", "is lazy", "6 channels"), strict=True):
            assert part in line
        assert type(model[0]) is nn.BatchNorm1d


# --- The cached gradient is the full batch's, in a micro-batch's memory, where plain accumulation is not -------------


def contrastive(image: torch.Tensor, text: torch.Tensor, temperature: Any = 0.2) -> torch.Tensor:
    logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / temperature
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


@dataclass
class Contrast:
    """A contrastive problem: how to embed, and the loss over all embeddings."""

    model: nn.Module
    embed: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any], torch.Tensor]
    batch: Any

    def parts(self, steps: int = 4) -> list[Any]:
        size = len(self.batch[0]) // steps
        return [tuple(rows[k * size : (k + 1) * size] for rows in self.batch) for k in range(steps)]

    def full_loss(self, model: Any, batch: Any) -> torch.Tensor:
        return self.loss(self.embed(model, batch), batch)

    def full(self) -> list[torch.Tensor]:
        """The gradient of the full batch in one pass."""
        self.model.zero_grad()
        self.full_loss(self.model, self.batch).backward()
        return gradients(self.model)

    def cached(self, steps: int = 4, **options: Any) -> list[torch.Tensor]:
        self.model.zero_grad()
        CachedGradients(self.model, self.embed, self.loss, steps).step(self.batch, **options)
        return gradients(self.model)

    def accumulated(self, steps: int = 4) -> list[torch.Tensor]:
        """The gradient of plain accumulation."""
        self.model.zero_grad()
        for part in self.parts(steps):
            (self.full_loss(self.model, part) / steps).backward()
        return gradients(self.model)


def tower(features: int, dropout: float = 0.0, hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 5))


def encoders(dropout: float = 0.0, size: int = 16) -> Contrast:
    """Two encoders and a tuple of embeddings."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"image": tower(6, dropout), "text": tower(7, dropout)}).double()

    def embed(model: Any, batch: Any) -> Any:
        return model["image"](batch[0]), model["text"](batch[1])

    batch = torch.randn(size, 6).double(), torch.randn(size, 7).double()
    return Contrast(model, embed, lambda found, _: contrastive(*found), batch)


def learnt_temperature() -> Contrast:
    """A parameter that only the loss uses."""
    problem = encoders()
    problem.model["scale"] = nn.ParameterDict({"log": nn.Parameter(torch.tensor(1.0).double())})
    problem.loss = lambda found, _: contrastive(*found, temperature=(-problem.model["scale"]["log"]).exp())
    return problem


def returned_temperature() -> Contrast:
    """The same parameter, but a scalar among the outputs of the encoder, as in open_clip."""
    problem = learnt_temperature()
    inner = problem.embed
    problem.embed = lambda model, batch: {"pair": inner(model, batch), "by": (-model["scale"]["log"]).exp(), "of": "x"}
    problem.loss = lambda found, _: contrastive(*found["pair"], temperature=found["by"])
    return problem


def hard_negatives() -> Contrast:
    """One shared encoder, three rows of negatives for every sample, and labels that only the loss reads."""
    torch.manual_seed(0)
    model = tower(6).double()

    def embed(model: nn.Module, batch: Any) -> Any:
        anchor, negatives, _ = batch
        return [model(anchor), model(negatives.flatten(0, 1)), anchor.argmax(1)]

    def loss(found: Any, batch: Any) -> torch.Tensor:
        anchor, negatives, kind = found
        assert kind.dtype is torch.int64 and len(kind) == len(batch[2])
        return ((anchor @ negatives.T).logsumexp(1) * batch[2]).mean()

    batch = torch.randn(16, 6).double(), torch.randn(16, 3, 6).double(), torch.rand(16).double()
    return Contrast(model, embed, loss, batch)


PROBLEMS = (encoders, learnt_temperature, returned_temperature, hard_negatives)


@pytest.mark.parametrize("build", PROBLEMS)
def test_gives_the_gradient_of_the_full_batch_and_plain_accumulation_does_not(build: Callable[[], Contrast]) -> None:
    problem = build()
    for steps in (1, 2, 4, 5, 16):
        assert difference(problem.cached(steps), problem.full()) < 1e-14, steps
    assert difference(problem.accumulated(), problem.full()) > 0.05


def test_repairs_what_gaverify_finds() -> None:
    problem = encoders()
    verdict = gaverify.verify(problem.model, problem.full_loss, problem.batch)
    (finding,) = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert finding.code == "GAV103" and "gaverify.remedies.CachedGradients" in finding.remedy


def test_returns_the_loss_and_adds_to_the_gradient() -> None:
    problem = encoders()
    expected = problem.full()
    step = CachedGradients(problem.model, problem.embed, problem.loss, 4)
    value = step.step(problem.batch)  # the gradient of `full` is still there
    assert not value.requires_grad and value == pytest.approx(problem.full_loss(problem.model, problem.batch).item())
    assert difference(gradients(problem.model), [2 * gradient for gradient in expected]) < 1e-14
    step.step(problem.batch)  # without the check of the first one
    assert difference(gradients(problem.model), [3 * gradient for gradient in expected]) < 1e-14
    scaled = problem.cached(scale=lambda loss: loss * 1024)
    assert difference(scaled, [1024 * gradient for gradient in expected]) < 1e-14


def with_graph(problem: Contrast, steps: int) -> torch.Tensor:
    """The loss of the window with every micro-batch's graph alive: the oracle for draws that depend on the batch."""
    found = [problem.embed(problem.model, part) for part in problem.parts(steps)]
    return problem.loss(tuple(torch.cat(rows) for rows in zip(*found, strict=True)), problem.batch)


def test_dropout_is_replayed_in_the_second_pass() -> None:
    problem = encoders(dropout=0.5)
    torch.manual_seed(3)
    with_graph(problem, 4).backward()
    expected, drawn_next = gradients(problem.model), torch.rand(3)
    torch.manual_seed(3)
    assert difference(problem.cached(), expected) < 1e-14
    assert torch.equal(torch.rand(3), drawn_next), "the generator stands where one pass leaves it"


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.bfloat16),
        pytest.param(
            "cuda",
            torch.float16,
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_autocast_with_dropout_and_a_scaler(device: str, dtype: torch.dtype) -> None:
    """Every weight has a gradient: no cast without a graph is used. The device's own generator is replayed."""
    problem = encoders(dropout=0.5)
    problem.model.float().to(device)
    problem.batch = tuple(rows.float().to(device) for rows in problem.batch)
    scaler = torch.amp.GradScaler(device, init_scale=128.0)
    torch.manual_seed(3)
    with torch.autocast(device, dtype):
        loss = with_graph(problem, 4)
    scaler.scale(loss).backward()
    expected, drawn_next = gradients(problem.model), torch.rand(3, device=device)
    torch.manual_seed(3)
    with torch.autocast(device, dtype):
        found = problem.cached(scale=scaler.scale)
        assert torch.is_autocast_enabled(device)
        assert torch.equal(torch.rand(3, device=device), drawn_next)
        assert problem.embed(problem.model, problem.batch)[0].dtype is dtype
    assert len(found) == len(list(problem.model.parameters()))
    assert difference(found, expected) < 2e-2


def test_buffers_move_once() -> None:
    problem = encoders()
    problem.model["image"] = nn.Sequential(nn.BatchNorm1d(6).double(), problem.model["image"])
    once = copy.deepcopy(problem.model)
    for part in problem.parts():
        problem.embed(once, part)
    problem.cached()
    for name, buffer in problem.model.named_buffers():
        assert torch.equal(buffer, once.get_buffer(name)), name


class Saved:
    """Counts the bytes that autograd keeps for the backward, without the parameters, and their peak."""

    def __init__(self, model: nn.Module) -> None:
        self.now = self.peak = 0
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(self, tensor: torch.Tensor) -> Any:
        counter = self

        class Held:
            def __init__(self) -> None:
                self.tensor = tensor
                own = tensor.untyped_storage().data_ptr() in counter._own
                self.size = 0 if own else tensor.numel() * tensor.element_size()
                counter.now += self.size
                counter.peak = max(counter.peak, counter.now)

            def __del__(self) -> None:
                counter.now -= self.size

        return Held()

    def of(self, run: Callable[[], Any]) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda held: held.tensor):
            run()
        return self.peak


def test_memory_is_that_of_a_micro_batch() -> None:
    """Saved activations peak at one micro-batch's embedding or at the loss over all embeddings, whichever is more."""
    problem = encoders(size=64)
    problem.model["image"], problem.model["text"] = tower(6, hidden=256).double(), tower(7, hidden=256).double()
    model, part = problem.model, tuple(rows[:4] for rows in problem.batch)
    full = Saved(model).of(problem.full)
    micro = Saved(model).of(lambda: [out.sum() for out in problem.embed(model, part)])
    found = [output.detach().requires_grad_() for output in problem.embed(model, problem.batch)]
    loss = Saved(model).of(lambda: problem.loss(found, problem.batch))
    cached = Saved(model).of(lambda: problem.cached(steps=16))
    assert cached <= max(micro, loss)
    assert full >= 16 * micro > 0
    assert Saved(model).of(lambda: with_graph(problem, 16).backward()) >= full, "cutting alone saves nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed": lambda model, batch: 3.0}, "returned no tensor"),
        ({"embed": lambda model, batch: (model["image"](batch[0]), model["text"](batch[1]).mean())}, "a scalar that"),
        ({"embed": lambda model, batch: (model["image"](batch[0]), object())}, "returned a object"),
        ({"embed": lambda model, batch: [batch[0]] * int(batch[0][0, 0] > 0) + [batch[1]]}, "another structure"),
        ({"loss": lambda found, _: found[0]}, r"the loss is of shape \[16, 5\]"),
        ({"loss": lambda found, _: 1.0}, "the loss is a float"),
        ({"loss": lambda found, _: found[0].sum().detach()}, "no graph"),
        ({"steps": 17}, "cannot be cut from a batch of 16"),
        ({"steps": 0}, "at least one micro-batch"),
    ],
)
def test_bad_input_gets_a_sentence(change: dict[str, Any], message: str) -> None:
    problem = encoders()
    arguments = {"embed": problem.embed, "loss": problem.loss, "steps": 4} | change
    step = CachedGradients(problem.model, arguments["embed"], arguments["loss"], arguments["steps"])
    with pytest.raises(ProblemError, match=message):
        step.step(problem.batch)


def test_a_generator_of_its_own_is_noticed() -> None:
    problem, own = encoders(), torch.Generator().manual_seed(0)
    inner = problem.embed

    def embed(model: Any, batch: Any) -> Any:
        image, text = inner(model, batch)
        return image + torch.randn(image.shape, generator=own, dtype=image.dtype), text

    problem.embed = embed
    with pytest.raises(ProblemError, match="generators of its own"):
        problem.cached()
