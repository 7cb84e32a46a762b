"""The command `t1`: finds the verb, reads its options as jsonargparse makes them of its signature, and runs it."""

import dataclasses
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn, get_args, get_type_hints

# Verb: (module, function, what it does). A module is loaded only for its own verb, so that asking for help is fast.
VERBS: dict[str, tuple[str, str, str]] = {
    "generate": ("solvers.datasets", "", "Make a data set with the embedded solvers."),
    "import": ("verbs", "import_", "Turn fields in any known format into a file of our own."),
    "analyze": ("reports.analysis_figures", "analyze_verb", "Look before you train: spectra, modes, what they cost."),
    "train": ("verbs", "train", "Train a model on your data."),
    "compare": ("verbs", "compare", "Train several models for the same seconds; say which to use."),
    "evaluate": ("verbs", "evaluate", "Measure a trained model on data of any resolution."),
    "predict": ("verbs", "predict", "Apply a trained model to fields."),
    "rollout": ("verbs", "rollout", "Let a trained model run ahead in time."),
    "report": ("reports.page", "report_verb", "Show runs on one page, side by side."),
    "export": ("verbs", "export", "Write a trained model as ONNX."),
    "demo": ("demo", "demo", "See all of it work, without any input, in minutes."),
}
SOLVERS = ("navier-stokes", "smoke", "airfoils")  # of `t1 generate`


def main() -> None:
    """Run the verb named on the command line; bad input is one sentence and exit code 2."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return
    if words[0] == "--version":
        from transform_once import __version__

        print(f"t1 {__version__}")
        return
    warnings.showwarning = lambda message, *_, **__: print(f"t1: note: {message}", file=sys.stderr)
    try:
        _run(words[0], words[1:])
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError) as error:
        if os.environ.get("T1_TRACEBACK"):
            raise
        print(f"t1: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _overview() -> str:
    lines = "\n".join(f"  {verb:<9} {does}" for verb, (_, _, does) in VERBS.items())
    return (
        "usage: t1 VERB [options]\n\nFast surrogates of physical systems, learned in the frequency domain.\n\n"
        f"{lines}\n\n`t1 VERB --help` shows every option with its default; "
        "an option of a group may go without it: --epochs 10 for --train.epochs 10."
    )


def _run(verb: str, words: list[str]) -> None:
    from jsonargparse import ArgumentParser, auto_cli

    from transform_once.config import find_config
    from transform_once.messages import nearest

    if verb not in VERBS:
        raise ValueError(f"there is no verb {verb!r}; {nearest(verb, VERBS)}")

    class Parser(ArgumentParser):
        """Complains in one sentence, and names what is near to an unknown option."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "allow_abbrev": False})

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            found = re.search(
                r"option: --(\S+)|Group '(.+)' does not accept option '(.+)'|Option '(.+)'|--(\S+)", message
            )
            near = ""
            if found and not re.search("required|Expected|does not exist|invalid|expected one", message):
                name = ".".join(part for part in found.groups() if part)
                known = [action.dest for action in self._actions if action.dest not in ("help", "print_shtab")]
                message, near = f"there is no option {name!r}", f"; {nearest(name, known)}"
            message = message.replace("the following arguments are required: data.path", "give the data: --data FILE")
            message = re.sub(r"Expected a typing.Literal(\[.*?\])", r"expected one of \1", message)
            print(f"t1 {verb}: {' '.join(message.split())}{near}", file=sys.stderr)
            sys.exit(2)

    module, function, _ = VERBS[verb]
    home = import_module(f"transform_once.{module}")
    components: Any = (
        getattr(home, function) if function else {name: getattr(home, name.replace("-", "_")) for name in SOLVERS}
    )
    if verb == "report":  # several folders before the options are one list
        count = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
        words = [json.dumps(words[:count]), *words[count:]] if count else words
    words = _spelled(words, {} if isinstance(components, dict) else _full_names(components))
    for number, word in enumerate(words[:-1]):
        if word == "--config":
            words[number + 1] = find_config(words[number + 1])
    auto_cli(components, args=words, prog=f"t1 {verb}", parser_class=Parser)


def _full_names(verb: Callable[..., None]) -> dict[str, str]:
    """Options that belong to a group, by their short name: `--epochs` is `--train.epochs`, `--data` the data's path."""
    parameters, hints = inspect.signature(verb).parameters, get_type_hints(verb)
    names: dict[str, str] = {}
    for group in parameters:
        for kind in (hints[group], *get_args(hints[group])):
            for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
                full = f"{group}.{field.name}"
                names |= {field.name: "" if field.name in names else full}
                names |= {group: full} if field.name == "path" else {}
    return {name: full for name, full in names.items() if full and (name not in parameters or full == f"{name}.path")}


def _spelled(arguments: list[str], full_names: dict[str, str]) -> list[str]:
    """Arguments as the parser wants them.

    `--target-time` with an underscore and the name of its group, `1062 600` after an option as a list, `--json` alone
    as true.
    """
    spelled: list[str] = []
    for number, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            name = full_names.get(name, name)
            alone = number + 1 == len(arguments) or arguments[number + 1].startswith("--")
            bare = alone and not equals and name not in ("help", "print_config")
            spelled.append(f"--{name}{equals}{value}" + ("=true" if bare else ""))
        elif _is_number(argument) and len(spelled) > 1 and spelled[-2].startswith("--") and _is_number(spelled[-1]):
            spelled[-1] = f"[{spelled[-1].strip('[]')},{argument}]"
        else:
            spelled.append(argument)
    return spelled


def _is_number(text: str) -> bool:
    """Whether the text is a number, or a list of numbers joined before."""
    return all(part.replace(".", "", 1).isdigit() for part in text.strip("[]").split(","))
