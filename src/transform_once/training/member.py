"""One model in training: its optimiser, its average, its random numbers, and its step, plain or as a CUDA graph."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from transform_once import kernels
from transform_once.models.operator import Operator
from transform_once.processes import World
from transform_once.spectral.precision import matmul_precision
from transform_once.training.distributed import fill, own, shared, whole
from transform_once.training.loss import Batch, Objective
from transform_once.training.optimizers import Average, make_optimizer, set_rate
from transform_once.training.settings import Training

EAGER_STEPS = 2  # before a step is captured: libraries set themselves up in them


class Member:
    """A model and everything that training it takes. `seed` decides data order and random motions."""

    def __init__(self, model: Operator, objective: Objective, seed: int, settings: Training, place: World) -> None:
        self.model, self.objective, self.seed, self.settings, self.place = model, objective, seed, settings, place
        self.captures = place.device.type == "cuda" and place.size == 1 and settings.capture
        self.reason = _why_eager(settings, place)
        self.shared: nn.Module = shared(objective, place, settings.sharding)
        if place.size > 1 and settings.sharding == "fsdp" and settings.optimizer == "muon":
            raise ValueError("muon needs whole matrices, which fsdp cuts up: use adamw, or sharding ddp")
        assert settings.optimizer is not None  # resolved: told to the type checker
        assert settings.learning_rate is not None
        assert settings.weight_decay is not None
        chosen = (settings.optimizer, settings.learning_rate, settings.weight_decay)
        self.optimizer = make_optimizer(self.objective.model, *chosen, capturable=self.captures)
        self.average = Average(model, settings.average) if settings.average else None
        self.generator = torch.Generator(place.device)
        self.stream = torch.cuda.Stream(place.device) if self.captures else None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}
        self.before: Batch = {}  # what `remember` remembered

    def order(self, epoch: int, count: int) -> Tensor:
        """The samples of an epoch in random order, from seed and epoch alone."""
        generator = torch.Generator().manual_seed(_mixed(self.seed, epoch))
        return torch.randperm(count, generator=generator).to(self.place.device)

    def step(self, batch: Batch, rate: float, number: int, count: int) -> Tensor:
        """One update with the samples of this process, of `count` in all processes; gives their loss."""
        self.generator.manual_seed(_mixed(self.seed, number, 1))
        if self.stream is None:
            self._set(rate, number)
            return self._update(batch, count)
        self.stream.wait_stream(torch.cuda.current_stream())
        for tensor in batch.values():
            tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            self._set(rate, number)
            return self._captured(batch, count)

    def _set(self, rate: float, number: int) -> None:
        """What changes from step to step."""
        set_rate(self.optimizer, rate)
        if self.average:
            self.average.at(number)

    def finish(self) -> None:
        """Wait until all steps are done."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    @contextlib.contextmanager
    def kept_weights(self) -> Iterator[None]:
        """Within, the model has the weights that are validated and kept: the averaged ones where there are."""
        self.finish()
        with self.average.applied(self.model) if self.average else contextlib.nullcontext():
            yield

    def errors(self, batch: Batch) -> Tensor:
        """The relative L2 of each sample, as the model is, without motions."""
        was = self.objective.training
        self.shared.eval()
        try:
            with torch.no_grad():
                # Shards are put together by the wrapped module alone; copies need no gradients here.
                ask = self.objective if self.settings.sharding == "ddp" else self.shared
                return ask(batch)
        finally:
            self.shared.train(was)

    def _update(self, batch: Batch, count: int) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        # Gradients are averaged over the processes, so that the sum over all samples comes out divided by `count`.
        with matmul_precision("high" if self.settings.precision == "tf32" else "highest"):
            loss = self.shared(batch, self.generator).sum() / count
            (loss * self.place.size).backward()
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        if self.average:
            self.average.update(self.model)
        return loss.detach()

    def _captured(self, batch: Batch, count: int) -> Tensor:
        if count not in self.graphs:
            return self._update(batch, count)
        graph, static, loss = self.graphs[count]
        for name, tensor in batch.items():
            static[name].copy_(tensor)
        graph.replay()
        return loss.clone()

    def capture(self, batch: Batch) -> None:
        """Compile and capture the step of batches of this size, and leave everything as it was.

        To be called before training: kernels and libraries take their time to set up, which is not that of training.
        """
        if self.stream is None or not self.captures:
            return
        kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        average = {} if self.average is None else {name: one.clone() for name, one in self.average.tensors.items()}
        count = len(next(iter(batch.values())))
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), kernels.recorded():
            set_rate(self.optimizer, 0.0)
            self.generator.manual_seed(0)
            for _ in range(EAGER_STEPS):
                self._update(batch, count)
            self._record(batch, count)
        self.finish()
        torch.cuda.synchronize()
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(kept[name])
            for name, one in average.items():
                self.average.tensors[name].copy_(one)  # type: ignore[union-attr]
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()

    def _record(self, batch: Batch, count: int) -> None:
        static = {name: tensor.clone() for name, tensor in batch.items()}
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            # Of other threads one may be reading the next batch: only this one is held to the rules of capture.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                loss = self._update(static, count)
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.captures, self.reason = False, f"eager: {str(error).splitlines()[0]}"
            self.generator = torch.Generator(self.place.device).manual_seed(0)
            return
        self.graphs[count] = (graph, static, loss)

    def _changing(self) -> Batch:
        """Everything that changes in training, by name: weights, optimiser and average."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, parameter in enumerate(self._parameters()):
            state = self.optimizer.state.get(parameter, {})
            found |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
        if self.average:
            found |= {f"average.{name}": tensor for name, tensor in self.average.tensors.items()}
        return found

    @torch.no_grad()
    def remember(self) -> None:
        """Keep a copy of all that changes in training, where it is."""
        now = self._changing()
        if now.keys() == self.before.keys():
            torch._foreach_copy_([own(one) for one in self.before.values()], [own(one) for one in now.values()])
        else:
            self.before = {name: tensor.detach().clone() for name, tensor in now.items()}

    @torch.no_grad()
    def go_back(self) -> None:
        """Take up where `remember` was called; what was not there yet is zero, as it began."""
        for name, tensor in self._changing().items():
            if name in self.before:
                tensor.copy_(self.before[name])
            else:
                tensor.zero_()

    def tensors(self) -> Batch:
        """Copies of all that changes in training, and of what is remembered. All processes must ask."""
        found = self._changing() | {f"before.{name}": tensor for name, tensor in self.before.items()}
        return {name: whole(tensor).detach().cpu().clone() for name, tensor in found.items()}

    @torch.no_grad()
    def restore(self, tensors: Batch) -> None:
        """Take up where `tensors` was asked for."""
        for name, tensor in self.model.state_dict().items():
            fill(tensor, tensors[f"model.{name}"])
        for index, parameter in enumerate(self._parameters()):
            prefix = f"optimizer.{index}."
            saved = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            state = self.optimizer.state[parameter]
            for name, value in saved.items():
                if name in state:  # a captured step knows where it lies
                    fill(state[name], value)
                elif value.shape == parameter.shape:
                    state[name] = torch.zeros_like(parameter)
                    fill(state[name], value)
                else:  # a counter of steps, which lies beside its parameter where one kernel updates them
                    state[name] = value.to(parameter.device if self.optimizer.defaults["fused"] else "cpu")
        if self.average:
            for name, tensor in self.average.tensors.items():
                fill(tensor, tensors[f"average.{name}"])
        for name, tensor in self._changing().items():
            if f"before.{name}" in tensors:
                self.before[name] = tensor.detach().clone()
                fill(self.before[name], tensors[f"before.{name}"])

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def _why_eager(settings: Training, place: World) -> str:
    if place.device.type != "cuda":
        return f"eager: the device is {place.device.type}"
    if place.size > 1:
        return "eager: several processes sum their gradients in every step"
    return "one CUDA graph a step" if settings.capture else "eager: as asked for"


def _mixed(*numbers: int) -> int:
    """One seed of several numbers, such that neighbours have nothing in common."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = ((mixed ^ (number + 1)) * 0xBF58476D1CE4E5B9) % 2**63
        mixed ^= mixed >> 31
    return mixed
