"""`topoplan predict`: predict memory and time of given layouts, without a search."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.options import ProfilePath, argument, option
from topoplan.cli.output import print_json, stdout_console
from topoplan.errors import TopoplanError

if TYPE_CHECKING:
    from topoplan.cli.run_documents import RunDocument
    from topoplan.report.predictions import Prediction
    from topoplan.specs.profile import OwnProfile


def predict(
    runs: Annotated[
        str,
        argument(
            "RUNS",
            "A .jsonl file with one run document a line, a .yaml or .json file with one, or - for standard input.",
        ),
    ],
    profile: ProfilePath = None,
    as_json: Annotated[bool, option("--json", "Print one JSON object a line.")] = False,
) -> None:
    """A document that cannot be predicted yields its error, and the rest are still processed.

    Exit code 2: none could be predicted.
    """
    from topoplan.cli.run_documents import read_run_documents
    from topoplan.report.predictions import prediction_to_dict, print_predictions
    from topoplan.specs.profile import read_profile

    own = None if profile is None else read_profile(profile)
    # As in a spec, a model's relative path is relative to the file that names it.
    base = Path.cwd() if runs == "-" else Path(runs).parent
    predictions = (_predict_one(document, base, own) for document in read_run_documents(runs))
    shown = []
    for prediction in predictions:
        if as_json:
            print_json(prediction_to_dict(prediction), indent=None)
        shown.append(prediction)
    if not as_json:
        print_predictions(stdout_console(), shown)
    if all(prediction.error for prediction in shown):
        raise typer.Exit(2)


def _predict_one(document: RunDocument, base: Path, profile: OwnProfile | None) -> Prediction:
    from topoplan.planner.predict import predict as predict_layout
    from topoplan.report.predictions import Prediction
    from topoplan.specs.load import spec_from_document

    if document.error:
        return Prediction(id=document.id, error=document.error)
    try:
        spec = spec_from_document(document.spec, where=document.where, base=base, profile=profile)
        return Prediction(id=document.id, plan=predict_layout(spec, document.layout))
    except TopoplanError as error:
        return Prediction(id=document.id, error=str(error))
    except Exception as error:  # a defect triggered by one document must not cost the other answers
        return Prediction(
            id=document.id, error=f"{document.where}: defect in topoplan: {type(error).__name__}: {error}"
        )
