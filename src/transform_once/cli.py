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
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

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
    "reproduce": ("reports.paper_figures", "reproduce_verb", "Make a figure of the paper, or run a whole study of it."),
    "export": ("verbs", "export", "Write a trained model as ONNX."),
    "demo": ("demo", "demo", "See all of it work, without any input, in minutes."),
}
SOLVERS = {  # of `t1 generate`, with their modules
    **dict.fromkeys(("navier-stokes", "smoke", "airfoils"), "solvers.datasets"),
    **dict.fromkeys(("darcy", "burgers", "advection", "diffusion-advection"), "solvers.more_datasets"),
}
STUDIES = ("navier-stokes", "airfoils", "smoke", "climate")  # of `t1 reproduce`, besides the figures


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
        print(f"t1: {_sentence(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _complaint(message: str, verb: str) -> str:
    """What the parser says, in the words of this command: what was expected, and what came."""
    message = re.sub(r'^Parser key "([\w.]+)"', r"--\1", message)
    where = "FOLDER" if verb.startswith("reproduce") else "FILE"
    message = re.sub(r"the following arguments are required: data(\.path)?$", f"give the data: --data {where}", message)
    message = re.sub(r"the following arguments are required: (.+)$", rf"give \1: `t1 {verb} --help` shows how", message)
    wrong = re.search(
        r"Subtypes: \[(.*)\] Errors: .*Given value: (.*)$|Expected an? (\S.*)\. Got value: (.*)$", message
    )
    if wrong is None:
        return message
    kinds, value, kind, got = wrong.groups()
    found = []
    for one in re.split(r", (?![^\[]*\])", kinds or kind):
        plain = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", one).replace("NoneType", "null")
        choice = re.fullmatch(r"typing\.Literal\[(.*)\]", plain)
        found.append("one of " + choice[1].replace("'", "") if choice else plain)
    return f"{message.partition(': ')[0]}: expected {' or '.join(found)}; got {value or got}"


def _sentence(error: Exception) -> str:
    """What is wrong; the operating system's complaints about a file begin with the file, not with a number."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _load(module: str, function: str) -> Any:
    return getattr(import_module(f"transform_once.{module}"), function.replace("-", "_"))


def _overview() -> str:
    lines = "\n".join(f"  {verb:<9} {does}" for verb, (_, _, does) in VERBS.items())
    return (
        "usage: t1 VERB [options]\n\nFast surrogates of physical systems, learned in the frequency domain.\n\n"
        f"{lines}\n\nStudies: t1 reproduce {', '.join(STUDIES)}. `t1 VERB --help` shows every option with its default; "
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
            print(f"t1 {verb}: {_complaint(' '.join(message.split()), verb)}{near}", file=sys.stderr)
            sys.exit(2)

    module, function, _ = VERBS[verb]
    if verb == "reproduce" and words and words[0] in STUDIES:
        function = words.pop(0).replace("-", "_")
        module, verb = f"studies.{function}", f"reproduce {function.replace('_', '-')}"
    solvers = {name: _load(home, name) for name, home in SOLVERS.items()} if not function else {}
    components: Any = _load(module, function) if function else solvers
    if verb.startswith("reproduce "):
        words = _by_name(components, words)
    words = _spelled(words, *(({}, [], False) if isinstance(components, dict) else _named(components)))
    for number, word in enumerate(words[:-1]):
        if word == "--config":
            words[number + 1] = find_config(words[number + 1])
    auto_cli(components, args=words, prog=f"t1 {verb}", parser_class=Parser)


def _named(verb: Callable[..., None]) -> tuple[dict[str, str], list[str], bool]:
    """What is to be known of a verb's options.

    The full names of those that belong to a group (`--epochs` is `--train.epochs`, `--data` the data's path, `--model`
    the model's name), the names of those that take several values, and whether the words before the options are several
    values.
    """
    parameters, hints = inspect.signature(verb).parameters, get_type_hints(verb)
    names: dict[str, str] = {}
    lists = []
    for group in parameters:
        lists += [group] if _is_list(hints[group]) else []
        for kind in (hints[group], *get_args(hints[group])):
            for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
                full = f"{group}.{field.name}"
                lists += [full] if _is_list(get_type_hints(kind)[field.name]) else []
                names |= {field.name: "" if field.name in names else full}
                names |= {group: full} if field.name in ("path", "name") else {}
    full_names = {n: full for n, full in names.items() if full and (n not in parameters or full.startswith(f"{n}."))}
    return full_names, lists, next(iter(parameters)) in lists


def _is_list(hint: Any) -> bool:
    """Whether it is a list or nothing."""
    kinds = {hint} if get_origin(hint) is list else set(get_args(hint)) - {type(None)}
    return bool(kinds) and all(get_origin(kind) is list for kind in kinds)


def _by_name(verb: Callable[..., None], words: list[str]) -> list[str]:
    """The only argument that a verb cannot do without may also be named: `--data FOLDER` for `FOLDER`."""
    needed = [name for name, one in inspect.signature(verb).parameters.items() if one.default is one.empty]
    if len(needed) == 1 and f"--{needed[0]}" in words[:-1]:
        place = words.index(f"--{needed[0]}")
        return [words[place + 1], *words[:place], *words[place + 2 :]]
    return words


def _spelled(arguments: list[str], full_names: dict[str, str], lists: list[str], several: bool) -> list[str]:
    """Arguments as the parser wants them.

    `--target-time` with an underscore and the name of its group, several values as one list, `--json` alone as true.
    """
    spelled: list[str] = []
    rest = list(arguments)
    if several and rest and not rest[0].startswith("-"):
        spelled.append(json.dumps(_values(rest)))
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            spelled.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        name = full_names.get(name, name)
        values = [value] if equals else _values(rest) if name in lists else rest[:1]
        if equals or name in ("help", "print_config"):
            spelled.append(f"--{name}{equals}{value}")
        elif not values or values[0].startswith("--"):
            spelled.append(f"--{name}=true")
        elif name in lists and not values[0].startswith("["):
            spelled += [f"--{name}", json.dumps([_number(text) for text in values])]
        elif all(map(_is_number, (numbers := _values(list(rest))))) and len(numbers) > 1:
            spelled += [f"--{name}", json.dumps([_number(text) for text in _values(rest)])]
        else:
            spelled += [f"--{name}", {"nan": ".nan"}.get(values[0].lower(), values[0])]  # as YAML writes it
            del rest[: 0 if name in lists else 1]
    return spelled


def _values(rest: list[str]) -> list[str]:
    """The words before the next option, taken from the list."""
    count = next((number for number, word in enumerate(rest) if word.startswith("--")), len(rest))
    taken, rest[:count] = rest[:count], []
    return taken


def _number(text: str) -> float | int | str:
    return text if not _is_number(text) else int(text) if text.lstrip("-").isdigit() else float(text)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?", text) is not None
