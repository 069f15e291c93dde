"""A trainer that tells its callbacks what happens, and some of them."""


class Trainer:
    """Trains a model on batches; `on` registers what is called at `after_backward`, `before_step` or `after_step`."""

    def __init__(self, model, optimizer, accumulate):
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate
        self.forcing = 1.0
        self.callbacks = []

    def on(self, event, callback):
        self.callbacks.append((event, callback))

    def tell(self, event):
        for of_event, callback in self.callbacks:
            if of_event == event:
                callback(self)  # uses: unit_gradients forcing

    def fit(self, batches, loss_of):
        for step, batch in enumerate(batches, 1):
            (loss_of(self, batch) / self.accumulate).backward()
            self.tell("after_backward")  # uses: unit_gradients forcing
            if step % self.accumulate == 0:
                self.tell("before_step")
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.tell("after_step")


class UnitGradients:
    """Gradients of length 1, layer by layer."""

    def __call__(self, trainer):
        for parameter in trainer.model.parameters():
            parameter.grad.div_(parameter.grad.norm() + 1e-8)  # fault: unit_gradients


def trust_predictions(trainer):
    """Feeds the model less of the truth and more of what it has predicted."""
    trainer.forcing *= 0.7  # fault: forcing
