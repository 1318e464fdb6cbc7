"""The loop and the options that both examples share. Knows no framework: an example hands in its `Parts`."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from . import data, records
from .model import FULL, TINY, Config, first_state, learning_rate

_VALIDATION_BATCHES = 4
_REPORTS = 12  # a run, at most
_VALIDATION_SEED = 2**32 - 1  # its own: no training step uses it


@dataclasses.dataclass(frozen=True)
class Parts:
    """What an example is.

    Attributes:
        name: Title of its picture; its first word names the folder of the records.
        on_gpu: Whether it will run on one.
        put: NumPy array -> where the example computes.
        get: and back.
        step: (state, tokens, step, learning rate, config) -> state, loss, counts (layers, experts); waits for nothing.
        loss: (params, tokens, config) -> cross entropy.
    """

    name: str
    on_gpu: Callable[[], bool]
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]
    step: Callable[[Any, Any, int, float, Config], tuple[Any, Any, Any]]
    loss: Callable[[Any, Any, Config], Any]


def train(
    parts: Parts, config: Config, folder: Path, seed: int = 0, until: int | None = None, resume: bool = False,
    save_every: int = 500,
) -> records.History:  # fmt: skip
    """Train to step `until` of `config.steps`, report, and leave the records in `folder`."""
    console = Console(highlight=False, soft_wrap=True)
    folder.mkdir(parents=True, exist_ok=True)
    source, held_out = data.text()
    entropy = data.unigram_entropy(held_out)
    state, history = records.load(folder, config, seed) if resume else (first_state(config, seed), records.History())
    state = _each(parts.put, state)
    size = sum(value.size for value in state["params"].values())
    console.print(
        f"[bold]{parts.name}[/]: {size / 1e6:.2f} million parameters, {config.layers} layers, "
        f"{config.experts} experts, top {config.top_k};\n"
        f"{config.batch * config.context} tokens a step from {len(source) / 1e6:.1f} MB of text.\n"
        f"Unigram entropy of the validation text: {entropy:.3f} nats a byte."
    )
    last = min(config.steps, config.steps if until is None else until)
    every = max(config.steps // _REPORTS, 1)
    # The clock of the rate: from the last report to this one, without validation and checkpoints.
    started, reported = time.perf_counter(), history.step
    for step in range(history.step + 1, last + 1):
        tokens = parts.put(data.batch(source, config.batch, config.context, seed, step))
        state, loss, counts = parts.step(state, tokens, step, learning_rate(config, step), config)
        history.losses.append(loss)
        history.counts.append(counts)
        if step % every == 0 or step in (1, last):
            _bring(parts, history)
            rate = (step - reported) * config.batch * config.context / (time.perf_counter() - started)
            found = history.validation[step] = validate(parts, state["params"], config, held_out)
            mean = float(np.mean(history.losses[-every:]))
            bar = "█" * round(20 * min(found / entropy, 1.5))
            console.print(f"step {step:5}  train {mean:.3f}  validation {found:.3f}  {rate:9,.0f} tokens/s  {bar}")
            started, reported = time.perf_counter(), step
        if step % save_every == 0 or step == last:
            _bring(parts, history)
            paused = time.perf_counter()
            records.save(folder, config, seed, _each(parts.get, state), history)
            started += time.perf_counter() - paused
    records.write(folder, parts.name, history, entropy)
    final = list(history.validation.values())[-1]
    console.print(f"Validation loss / unigram entropy: {final / entropy:.3f}. Records in {folder}.")
    return history


def validate(parts: Parts, params: Any, config: Config, held_out: np.ndarray) -> float:
    """Mean cross entropy on the same few batches every time."""
    seeds = ((_VALIDATION_SEED, each) for each in range(_VALIDATION_BATCHES))
    batches = [parts.put(data.batch(held_out, config.batch, config.context, *seed)) for seed in seeds]
    return float(np.mean([float(parts.loss(params, tokens, config)) for tokens in batches]))


def _each(convert: Callable[[Any], Any], state: records.State) -> records.State:
    return {part: {name: convert(value) for name, value in tree.items()} for part, tree in state.items()}


def _bring(parts: Parts, history: records.History) -> None:
    """Losses and counts since the last time to the host: waits, as reports and checkpoints do and steps do not."""
    history.losses[:] = [each if isinstance(each, float) else float(each) for each in history.losses]
    history.counts[:] = [each if isinstance(each, np.ndarray) else parts.get(each) for each in history.counts]


def run(parts: Parts, about: str | None) -> None:
    """The command of an example."""

    def command(
        steps: Annotated[int | None, typer.Option(min=1, help="Length of the run; default 2000, tiny 250.")] = None,
        tiny: Annotated[
            bool | None, typer.Option("--tiny/--full", help="Size of the model; default: tiny without a GPU.")
        ] = None,
        out: Annotated[Path | None, typer.Option(help="Folder of the records; default build/<example>.")] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in that folder.")] = False,
        until: Annotated[int | None, typer.Option(min=1, help="Stop there, to go on later with --resume.")] = None,
        seed: Annotated[int, typer.Option(min=0, help="Of parameters and batches.")] = 0,
        save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 500,
        balance: Annotated[float, typer.Option(min=0.0, help="Weight of the load-balancing loss; 0 is off.")] = 0.01,
    ) -> None:
        small = not parts.on_gpu() if tiny is None else tiny
        config = TINY if small else FULL
        config = dataclasses.replace(config, steps=steps or config.steps, balance=balance)
        folder = out or Path("build") / parts.name.split()[0]
        try:
            train(parts, config, folder, seed, until, resume, save_every)
        except (ValueError, FileNotFoundError) as error:
            raise SystemExit(str(error)) from error

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=about)(command)
    app()
