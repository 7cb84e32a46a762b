"""What the documentation tells to type works: Python blocks run, commands are understood, links lead somewhere."""

import json
import re
import shlex
from pathlib import Path

import jsonargparse
import matplotlib as mpl
import pytest

from transform_once import cli
from transform_once.solvers import datasets

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SMALLER = {  # in the blocks of the README, so that they take seconds
    "fields.split(1000, 200)": "fields.split(10, 4)",
    "epochs=500": "epochs=1",
    "steps=3)": "steps=3, epochs=1)",
}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands():
    """Every `t1 …` with options, in a block of a page or between backticks, and the name of the page."""
    for page in PAGES:
        lines = "\n".join(blocks(page, "")).replace("\\\n", " ").splitlines()
        inline = re.findall(r"`(t1 [^`]+)`", page.read_text())
        for line in (*lines, *inline):
            words = shlex.split(line, comments=True)
            if words[:1] == ["t1"] and words[1] in cli.VERBS and any(word.startswith("--") for word in words):
                yield page.name, words[1:]


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    text = "\n".join(blocks(ROOT / "README.md", "python"))
    for theirs, ours in SMALLER.items():
        assert text.count(theirs) == 1, f"{theirs} is not in the README: say here what is to be made smaller"
        text = text.replace(theirs, ours)
    monkeypatch.chdir(tmp_path)
    datasets.navier_stokes(Path("ns.h5"), 1e-3, 1.0, samples=14)
    datasets.smoke(Path("smoke.h5"), samples=4, frames=14, resolution=(48, 32))
    with mpl.rc_context():
        exec(compile(text, "README.md", "exec"), {})
    assert {"model.safetensors", "model.onnx", "runs"} <= {path.name for path in tmp_path.iterdir()}
    assert json.loads((tmp_path / "runs" / "ns" / "run.json").read_text())["status"] == "finished"


COMMANDS = list(commands())


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)}" for page, words in COMMANDS])
def test_commands_of_the_pages_are_understood(page, words, monkeypatch):
    read = []

    def only_read(components, args, parser_class, prog):
        parser = jsonargparse.auto_parser(components, parser_class=parser_class, prog=prog)
        read.append(parser.parse_args(args))

    monkeypatch.setattr(jsonargparse, "auto_cli", only_read)
    cli._run(words[0], list(words[1:]))
    assert len(read) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}, which is not there"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            known = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            known += re.findall(r'<a id="([^"]+)">', path.read_text())
            assert anchor in known, f"{page.name} links to {target}; {path.name} has {known}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_that_the_pages_name_are_there(page):
    named = set(re.findall(r"\b((?:benchmarks|examples|tests)/[\w/]+\.(?:py|yaml))", page.read_text()))
    assert not [name for name in named if not (ROOT / name).exists()]
