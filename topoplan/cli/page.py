"""`topoplan page`: serve the page of plans to a browser on this machine; and `--html FILE`: write it as one file."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from topoplan.cli.options import OptionalSpecPath, SpecOptions, option
from topoplan.cli.output import stdout_console, write_and_tell
from topoplan.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topoplan.page.server import PageServer
    from topoplan.planner.plan import Plan, Ranking
    from topoplan.specs.spec import Spec


_EXAMPLE = {
    "gpu": "h100-sxm-80gb",
    "nodes": "4",
    "model": "Qwen/Qwen3-8B",
    "seq_len": "4096",
    "batch": "64",
}
_TOP = 30
_KEPT = 16
"""Number of rankings kept in memory, so that a value can be changed back instantly."""
_LISTS = ("pin", "overrides")
_NOT_ASKED = ("profile",)


def page(
    spec: OptionalSpecPath = None,
    port: Annotated[int, option("--port N", "Where to serve; 0: any.", min=0, max=65535)] = 0,
    opens: Annotated[bool, option("--open", "Open the browser too.")] = False,
    *,
    options: SpecOptions,
) -> None:
    """Only this machine can open the page, and only with the complete address, which changes each time. Nothing is
    written and nothing leaves the machine. Ctrl-C ends it.
    """
    questions = Questions(spec, options)
    try:
        server = server_of(questions, port)
    except OSError as error:
        problem = f"port {port} cannot be used: {error.strerror}"
        raise InputError(problem, where="--port", remedy="without it any free one is taken") from None
    console = stdout_console()
    console.print(server.address, soft_wrap=True)
    console.print("Open it in a browser on this machine; Ctrl-C ends it.")
    console.file.flush()
    if opens:
        import webbrowser

        webbrowser.open(server.address)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def server_of(questions: Questions, port: int) -> PageServer:
    """Return a server for the page, not yet started. Raises InputError for a bad question, OSError for a bad port."""
    from topoplan.page.html import live_html
    from topoplan.page.server import PageServer

    form = asked_on(questions.first(), questions.spec or "")
    answers = {name: getattr(questions, name) for name in ("dropped", "answer", "details", "along", "progress", "stop")}
    return PageServer(port, lambda: live_html(form), answers)


def asked_on(spec: Spec | None = None, name: str = "") -> dict[str, Any]:
    """Return the form of a page that starts with a spec of that name, or with an example."""
    from topoplan.catalog import model_parameters
    from topoplan.cli import completion
    from topoplan.page.form import form_of
    from topoplan.report.text import billions

    known = {
        "gpu": completion.gpus(),
        "finetuning": completion.finetunings(),
        "backend": completion.backends(""),
        "trainer": completion.trainers(),
    }
    models = {model: billions(model_parameters(model)) for model in completion.models()}
    return form_of(spec, name, _EXAMPLE, {"model": models, **{key: dict.fromkeys(of, "") for key, of in known.items()}})


class Questions:
    """Answers a page's questions, on top of the command line that it was started with. One search runs at a time;
    a new question ends the previous search."""

    def __init__(
        self, spec: str | None, options: SpecOptions, told: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """SPEC and options are those of `rank`; `told` is called with the progress of a search."""
        self.spec, self.options, self._told = spec, options, told
        self._turn = 0
        self._searching = threading.Lock()
        self._kept: OrderedDict[str, Ranking] = OrderedDict()
        self._progress = (0, 0)

    def first(self) -> Spec | None:
        """Return the spec of the command line alone, or None if there is none. Raises InputError."""
        return self.options.read(self.spec) if self.spec is not None or self.options else None

    def dropped(self, asked: Mapping[str, Any]) -> dict[str, str]:
        """Given `name` and `text` of a dropped file, return the option that it is for."""
        from topoplan.page.form import use_of

        return {"use": use_of(str(asked.get("name")), str(asked.get("text")))}

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Given a `question`, return the page, and the values that apply to empty fields."""
        from topoplan.page.document import page_to_dict
        from topoplan.page.form import values_of

        with self._asked(asked) as (source, options, words):
            ranking = self._ranking(source, options, asked)
            assumed = options.assumed(source)
            page = page_to_dict(ranking, top=_TOP, words=words, assumed=assumed, with_others=True)
        return page | {"has": values_of(ranking.spec)}

    def details(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Given a `question` and an `id`, return the details of one plan."""
        from topoplan.cli.plan_choice import plan_of_id
        from topoplan.page.document import details_to_dict

        wanted = str(asked.get("id", ""))
        with self._asked(asked) as (source, options, words):
            read, known = options.read(source), self._kept.get(_key(asked))
            places = {} if known is None else {one.id: place for place, one in enumerate(known.plans.layouts)}
            plan = known.plans[places[wanted]] if known and wanted in places else plan_of_id(read, wanted)
            return details_to_dict(read, plan, words)

    def along(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Given `question`, `key` and `values`, return `what-if --json` of the values, without the old plan's fate."""
        from topoplan.cli.what_if import outcome_of, read_changed
        from topoplan.planner.what_if import found_by
        from topoplan.report.what_if import outcomes_to_dict

        key, values = asked.get("key"), asked.get("values")
        if not isinstance(key, str) or not isinstance(values, list) or not 0 < len(values) <= 12:
            raise InputError("not a key with up to 12 values", where="along")
        with self._asked(asked) as (source, options, _), self._search_turn() as search:
            before = options.read(source)
            old, _ = found_by(before, search)
            outcomes = []
            for value in values:
                keys = (f"{key}={value}",)
                changed = read_changed(before, options, source, keys)
                outcomes.append(outcome_of(keys, changed, None, search))
        return outcomes_to_dict(before, old, outcomes)

    def progress(self, _: Mapping[str, Any]) -> dict[str, int]:
        """Return the progress of the search."""
        done, total = self._progress
        return {"done": done, "total": total}

    def stop(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """End the search, which returns what it has so far."""
        self._turn += 1
        return {}

    def _ranking(self, source: str | None, options: SpecOptions, asked: Mapping[str, Any]) -> Ranking:
        from topoplan.cli.rank import answered

        key = _key(asked)
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        with self._search_turn() as search:
            ranking = answered(source, options, search, partial(search, best_only=True))
        if ranking.searched == 1.0:
            self._kept[key] = ranking
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return ranking

    @contextmanager
    def _search_turn(self) -> Iterator[Callable[..., Ranking]]:
        """End the previous search, wait for its end, and provide a search that the next turn ends."""
        from topoplan.planner.search import rank

        self._turn += 1
        own = self._turn
        with self._searching:

            def stops(done: int, total: int) -> bool:
                self._progress = (done, total)
                self._told(done, total)
                return self._turn != own

            yield partial(rank, progress=stops)
            self._progress = (0, 0)

    @contextmanager
    def _asked(self, asked: Mapping[str, Any]) -> Iterator[tuple[str | None, SpecOptions, list[str]]]:
        """Provide the SPEC, the options and the command-line words of a question, while its files can be read. Raises
        InputError."""
        from topoplan.specs.source import held

        spec, given, files = _checked(asked.get("question"))
        said: dict[str, Any] = {
            name: [*(getattr(self.options, name) or ()), *value] if name in _LISTS else value
            for name, value in given.items()
            if value
        }
        options = replace(self.options if spec is None else SpecOptions(), **said)
        source = self.spec if spec is None else spec
        with held(files):
            yield source, options, options.words(source)


def _checked(question: Any) -> tuple[str | None, dict[str, Any], dict[str, str]]:
    """Validate an untrusted question; return the name of its spec, its options and its files. Raises InputError."""
    parts = question if isinstance(question, dict) else {}
    spec, given, files = parts.get("spec"), parts.get("options"), parts.get("files", {})
    names = {name for name in SpecOptions.__slots__ if name not in _NOT_ASKED}
    if not isinstance(files, dict) or not isinstance(given, dict) or not set(given) <= names:
        raise InputError("not a question", expected=f"expected options among {', '.join(sorted(names))}")
    for name, text in files.items():
        if not isinstance(text, str) or "/" in name or name in ("", ".", ".."):
            raise InputError("not a file", where=name)
    if spec is not None and (not isinstance(spec, str) or spec not in files):
        raise InputError("its spec is not among its files")
    for name, value in given.items():
        texts = value if name in _LISTS and isinstance(value, list) else [value]
        if not all(isinstance(one, str) for one in texts):
            raise InputError("not text", where=f"--{name.replace('_', '-')}")
    return spec, given, files


def _key(asked: Mapping[str, Any]) -> str:
    """Return the cache key of a ranking; files on disk are assumed not to change."""
    return json.dumps(asked.get("question"), sort_keys=True)


def write_ranking(path: str, ranking: Ranking, *, top: int, words: Sequence[str], assumed: Sequence[str]) -> None:
    """Write a page of the plans shown, with the account, the pictures and the files of each."""
    from topoplan.page.document import page_to_dict

    page = page_to_dict(ranking, top=top, words=words, assumed=assumed)
    _write(path, page, ranking.spec, ranking.plans[:top], words)


def write_plans(path: str, spec: Spec, plans: Sequence[Plan], *, words: Sequence[str]) -> None:
    """Write a page of one or two given plans."""
    from topoplan.page.document import plans_page_to_dict

    named = [*words, "--plan", plans[0].id, *(part for plan in plans[1:] for part in ("--versus", plan.id))]
    _write(path, plans_page_to_dict(spec, plans, named), spec, plans, words)


def _write(path: str, page: dict[str, Any], spec: Spec, plans: Sequence[Plan], words: Sequence[str]) -> None:
    from topoplan.page.document import details_to_dict
    from topoplan.page.html import MARK, answers_html

    text = answers_html(page, ((plan.id, details_to_dict(spec, plan, words)) for plan in plans))
    write_and_tell(path, text, mark=MARK, writer="--html")
