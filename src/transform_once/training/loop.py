"""The training loop: batches of data transformed once, one update each, validation, checkpoints; it can be stopped."""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from transform_once.messages import counted
from transform_once.models.operator import Operator
from transform_once.processes import World
from transform_once.training import run as folders
from transform_once.training.batches import Source
from transform_once.training.distributed import remade, whole
from transform_once.training.member import Member
from transform_once.training.optimizers import rate
from transform_once.training.plan import Plan
from transform_once.training.progress import Progress
from transform_once.training.run import State
from transform_once.training.settings import Training

CHECKPOINT_SECONDS = 30.0  # between two checkpoints, so that small runs do not spend their time on writing
STEPS_BETWEEN_CLOCKS = 20  # where the run has a budget of seconds
VALIDATIONS = 50  # in a run, unless asked otherwise
RUNAWAY, CALM = 5.0, 2.0  # times the lowest mean loss of an epoch: beyond the first go back, up to the second remember
SETBACKS = 5  # of a member at most; each halves its rate


class Trainer:
    """The members of a run and where it stands."""

    def __init__(
        self,
        models: list[Operator],
        plan: Plan,
        source: Source,
        description: dict[str, Any],
        folder: Path | None,
        place: World,
    ) -> None:
        self.models, self.source, self.description, self.folder, self.place = models, source, description, folder, place
        self.settings: Training = plan.settings
        self.epochs, self.batch_size = plan.settings.epochs or 1, plan.settings.batch_size or 1  # resolved before
        seeds = description["seeds"]
        self.members = [
            Member(model, plan.objective(model), seed, self.settings, place)
            for model, seed in zip(models, seeds, strict=True)
        ]
        self.validation = None if plan.validation is None else plan.source(place.device, validation=True)
        self.batches = math.ceil(len(self.source) / self.batch_size)
        self.state = State(
            best=[{"epoch": 0, "validation": None} for _ in models],
            losses=[[] for _ in models],
            lowest=[None for _ in models],
        )
        self.kept: list[dict[str, torch.Tensor]] = [{} for _ in models]  # best weights, where there is no folder
        self.saved = time.monotonic()
        self.rate_now = 0.0

    def _capture(self) -> float:
        """Let every member capture its steps, of whole batches and of what is left in the end; the seconds it takes."""
        began, count = time.monotonic(), len(self.source)
        sizes = {min(count, self.batch_size), count % self.batch_size} - {0}
        for size in sorted(sizes) if self.members[0].captures else ():
            batch = self.source.batch(torch.arange(size))
            for member in self.members:
                member.capture(batch)
        return round(time.monotonic() - began, 3)

    def run(self, bar: Progress, logs: Sequence[Any]) -> None:
        """Train to the end, or until a signal comes."""
        if self.members[0].captures:
            bar.say("compiling and capturing the step: the first time this takes some seconds")
        self.description["set_up_seconds"] = self._capture()
        self._restore()
        state, self.rate_now = self.state, self._rate()
        with _signals() as stop:
            while not self._over() and not stop:
                self._epoch(stop)
                if self.place.any(bool(stop)) and not self._over():  # what the seconds ended is closed as usual
                    break
                self._watch(bar)
                self._close_epoch(bar, logs)
            finished = self._over()
        self._write(final=finished)
        if finished:
            self._load_best()
        self.description["status"] = "finished" if finished else "stopped"
        if self.folder is not None and self.place.leads:
            folders.write_description(self.folder, self.description)
            if finished:  # not before: a run that is killed until here continues
                (self.folder / "checkpoint.safetensors").unlink(missing_ok=True)
        where = f": {self.folder}" if self.folder else ""
        took = f"{counted(state.epoch, 'epoch')} and {state.seconds:.1f} s of training"
        bar.say(f"{self.description['status']} after {took}{where}")

    @property
    def fraction(self) -> float:
        """How far the run is, 0 to 1."""
        settings, state = self.settings, self.state
        if settings.seconds is not None:
            return min(1.0, state.seconds / settings.seconds)
        return min(1.0, (state.epoch + state.batch / self.batches) / self.epochs)

    def _over(self) -> bool:
        settings, state = self.settings, self.state
        patience = settings.patience is not None and state.waited >= settings.patience
        ended = self.fraction >= 1 if settings.seconds is not None else state.epoch >= self.epochs
        return patience or ended

    def _rate(self) -> float:
        settings, state = self.settings, self.state
        half = 0.0 if settings.seconds is not None else 0.5 / (self.batches * self.epochs)
        assert settings.learning_rate is not None  # resolved: told to the type checker
        return rate(
            settings.schedule,
            settings.learning_rate,
            fraction=min(1.0, self.fraction + half),  # the middle of the step, so that none has the rate 0
            epoch=state.epoch + state.batch / self.batches,
            step=state.step,
            warmup=settings.warmup,
            step_size=settings.step_size,
            gamma=settings.gamma,
            period=settings.period,
        )

    def _epoch(self, stop: list[int]) -> None:
        """The rest of the present epoch, until its end, the end of the time, or a signal."""
        settings, state = self.settings, self.state
        rank, ranks = self.place.rank, self.place.size
        indices = [
            member.order(state.epoch, len(self.source)).split(self.batch_size)[state.batch :] for member in self.members
        ]
        mine = [[index[rank::ranks] for index in parts] for parts in indices]
        losses: list[list[torch.Tensor]] = [[] for _ in self.members]
        began, before = time.monotonic(), state.seconds
        feeds = [self.source.batches(parts) for parts in mine]
        for counts in zip(*(map(len, parts) for parts in indices), strict=True):
            now = self.rate_now = self._rate()
            for number, (member, feed) in enumerate(zip(self.members, feeds, strict=True)):
                slowed = now * self._slowed(number)
                losses[number].append(member.step(next(feed), slowed, state.step, counts[number]))
            state.batch, state.step = state.batch + 1, state.step + 1
            if settings.seconds is not None and state.step % STEPS_BETWEEN_CLOCKS == 0:
                self._finish()  # a GPU is behind the steps that it was given; the budget is of its time
            state.seconds = before + time.monotonic() - began
            if (settings.seconds is not None and self.fraction >= 1) or (stop and ranks == 1):
                break
        self._finish()
        for number in range(len(self.members)):
            if losses[number]:
                state.losses[number] += self.place.total(torch.stack(losses[number])).tolist()
        state.seconds = before + time.monotonic() - began

    def _watch(self, bar: Progress) -> None:
        """Remember the weights a hundred times in a run; where a loss ran away, go back to them, with half the rate.

        At a rate that is too large a network may be thrown out of all that it has learned in a few steps, and in the
        rest of the run comes back to a part of it. The schedule goes on, whose steps since then are lost.
        """
        began, state, means = time.monotonic(), self.state, self._means()
        due = self.fraction * 100 >= state.remembered + 1
        for number, (member, mean, lowest) in enumerate(zip(self.members, means, state.lowest, strict=True)):
            if lowest is not None and self._ran_away(mean, lowest) and self._slowed(number) > 0.5**SETBACKS:
                state.setbacks.append({"member": number, "epoch": state.epoch + 1})
                member.go_back()
                bar.say(
                    f"the loss ran away, from {lowest:.3g} to {mean:.3g}: back to weights before, with half the rate"
                )
                continue
            self._check_finite(number)
            state.lowest[number] = mean if lowest is None else min(mean, lowest)
            if lowest is None or (due and mean <= CALM * lowest):
                member.remember()
        state.remembered = max(state.remembered, math.floor(self.fraction * 100))
        state.seconds += time.monotonic() - began

    def _ran_away(self, mean: float, lowest: float) -> bool:
        restarts = self.settings.schedule == "restarts"  # after each of which a loss may rise
        return not math.isfinite(mean) or (not restarts and mean > RUNAWAY * lowest)

    def _slowed(self, number: int) -> float:
        """What is left of the rate of a member after its setbacks."""
        return 0.5 ** sum(row["member"] == number for row in self.state.setbacks)

    def _means(self) -> list[float]:
        """The mean loss of each member in this epoch."""
        sizes = [min(self.batch_size, len(self.source) - n * self.batch_size) for n in range(self.state.batch)]
        found = [zip(sizes, losses, strict=True) for losses in self.state.losses]
        return [sum(n * loss for n, loss in pairs) / sum(sizes) for pairs in found]

    def _finish(self) -> None:
        for member in self.members:
            member.finish()
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)

    def _check_finite(self, number: int) -> None:
        for batch, loss in enumerate(self.state.losses[number], start=1):
            if not math.isfinite(loss):
                who = f" of member {number}" if len(self.members) > 1 else ""
                kept = self.folder is not None and (self.folder / "checkpoint.safetensors").exists()
                where = f"the last checkpoint is in {self.folder}" if kept else "there is no checkpoint yet"
                raise FloatingPointError(
                    f"the loss{who} is {loss} in epoch {self.state.epoch + 1}, batch {batch}: lower learning_rate, "
                    f"add warmup or clip; {where}"
                )

    def _close_epoch(self, bar: Progress, logs: Sequence[Any]) -> None:
        """Validate, remember the best weights, and write."""
        state, now, means = self.state, self.rate_now, self._means()
        state.epoch, state.batch, state.losses = state.epoch + 1, 0, [[] for _ in self.members]
        errors = self._validate() if self._due() else [None] * len(self.members)
        for number, (loss, error) in enumerate(zip(means, errors, strict=True)):
            state.history.append(
                {
                    "member": number,
                    "epoch": state.epoch,
                    "step": state.step,
                    "seconds": round(state.seconds, 4),
                    "learning_rate": now * self._slowed(number),
                    "loss": loss,
                    "validation": error,
                }
            )
        known = [error for error in errors if error is not None]
        mean = sum(known) / len(known) if known else None
        bar.update(1.0 if self._over() else self.fraction, state.epoch, sum(means) / len(means), mean, now)
        values = {"loss": sum(means) / len(means), "learning_rate": now}
        for log in logs:
            log(values if mean is None else {**values, "validation": mean}, state.epoch)
        # Whether it is time is for one process to say: all take part in putting shards together.
        if self.place.any(self.place.leads and time.monotonic() - self.saved > CHECKPOINT_SECONDS):
            self._write()

    def _due(self) -> bool:
        if self.validation is None:
            return False
        every = self.settings.validate_every or max(1, self.epochs // VALIDATIONS)
        if self.settings.seconds is not None and not self.settings.validate_every:
            done = sum(row["validation"] is not None for row in self.state.history) / len(self.members)
            return self._over() or self.fraction * VALIDATIONS >= done + 1
        return self._over() or self.state.epoch % every == 0

    def _validate(self) -> list[float | None]:
        """The mean relative L2 of each member on the validation data, of its kept weights; the best are kept."""
        assert self.validation is not None  # told to the type checker
        found: list[float | None] = []
        improved = False
        everything = torch.arange(len(self.validation))
        ranks = self.place.size if self.settings.sharding == "ddp" else 1  # shards are put together by all at once
        if ranks > 1:
            everything = everything[self.place.rank :: ranks]
        for number, member in enumerate(self.members):
            with member.kept_weights():
                total = torch.zeros((), device=self.place.device, dtype=torch.float32)
                for batch in self.validation.batches(everything.split(self.batch_size)):
                    total += member.errors(batch).sum()
                error = float(self.place.total(total) if ranks > 1 else total) / len(self.validation)
                best = self.state.best[number]["validation"]
                if best is None or error < best or not math.isfinite(best):
                    improved = True
                    self.state.best[number] = {"epoch": self.state.epoch, "validation": error}
                    self._keep(number, "model")
            found.append(error)
        self.state.waited = 0 if improved else self.state.waited + 1
        return found

    def _keep(self, number: int, which: str) -> None:
        """Keep the present weights of a member, in the folder or in memory."""
        if self.folder is None:
            weights = self.models[number].state_dict()
            self.kept[number] = {name: tensor.detach().clone() for name, tensor in weights.items()}
        else:
            folders.save_whole(self.folder, which, self.models, number, self.place.leads)

    def _write(self, final: bool = False) -> None:
        """History and description, with the state to continue from; at the end the last weights instead."""
        state = self.state
        self.description |= {
            "epochs_done": state.epoch,
            "seconds": round(state.seconds, 3),
            "seconds_per_step": state.seconds / max(1, state.step),
            "best": state.best,
            "setbacks": state.setbacks,
            "captured": self.members[0].reason,
        }
        if final:
            for number, member in enumerate(self.members):
                with member.kept_weights():
                    self._keep_last(number)
        if self.folder is None:
            return
        tensors = {} if final else self._tensors()  # all processes put shards together, one writes
        if not self.place.leads:
            return
        folders.write_history(self.folder, state.history)
        if not final:
            folders.write_checkpoint(self.folder, tensors, state)
            folders.write_description(self.folder, self.description)
        self.saved = time.monotonic()

    def _keep_last(self, number: int) -> None:
        """Keep the present weights as the last; without validation data they are the best, too."""
        if self.folder is not None:
            self._keep(number, "last")
        if self.validation is None:
            self._keep(number, "model")

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Everything that changes in training, by member and name."""
        return {
            f"{number}.{name}": tensor
            for number, member in enumerate(self.members)
            for name, tensor in member.tensors().items()
        }

    def _restore(self) -> None:
        found = None if self.folder is None else folders.read_checkpoint(self.folder)
        if found is None:
            return
        tensors, self.state = found
        for number, member in enumerate(self.members):
            prefix = f"{number}."
            member.restore({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})

    def _load_best(self) -> None:
        """The best weights, into models that are whole again."""
        self.place.wait()  # one process has written them
        cut_up = self.place.size > 1 and self.settings.sharding == "fsdp"
        for number, model in enumerate(self.models):
            weights = {name: whole(tensor) for name, tensor in self.kept[number].items()}
            if self.folder is not None:
                weights = load_file(folders.weights_path(self.folder, "model", number, len(self.models)))
            if cut_up:
                model = self.models[number] = remade(model)
            model.load_state_dict(weights)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that gets the number of a signal to stop; a second one stops at once. Only the main thread gets them."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def catch(number: int, _: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    for number in before:
        signal.signal(number, catch)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
