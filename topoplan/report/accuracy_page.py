"""docs/accuracy.md: what predictions were graded against, how far off they were, and what nobody measured."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from topoplan.planner.bands import NARROWEST, coverages
from topoplan.planner.validate import ALLOCATED, BY_STAGE, RESERVED, THROUGHPUT, Spread, Validation
from topoplan.report.profile import catalog_profiles, kinds_text, memory_bands, time_bands
from topoplan.report.text import counted
from topoplan.report.validation import (
    figure_name,
    fit_line,
    fit_sentences,
    percent,
    ranking_sentence,
    signed_percent,
)
from topoplan.specs.gpu_profile import FEW_FIGURES, WIDER_FOR_FEW, WIDER_FOR_NONE, WIDEST

MARK = "<!-- written by `topoplan validate -o`"
_WIDTH = 120
_OTHERS = (
    # planner, source of the rows, kind of figure, its median and worst error in percent, what it was calibrated on
    ("SimuMax 4dcaae5", "SimuMax B200", ALLOCATED, 0.4, 0.7, "this machine's kernels (its B200 release table)"),
    ("SimuMax 4dcaae5", "SimuMax B200", f"{THROUGHPUT} bf16", 6.5, 13.5, "the same"),
    ("SimuMax 4dcaae5", "SimuMax A100 PCIe", ALLOCATED, 1.3, 2.9, "this machine's kernels (docs/FULL_RESULTS.md)"),
    ("SimuMax 4dcaae5", "SimuMax A100 PCIe", f"{THROUGHPUT} bf16", 1.6, 3.1, "the same"),
    (
        "Calculon caa4b11",
        "Korthikanti et al. 2022",
        f"{THROUGHPUT} bf16",
        1.3,
        3.3,
        "Selene, these runs among others (`calculon llm-validation`)",
    ),
)
"""What other planners say of themselves on rows that are graded here too."""
_ALONE = (
    "vTrain (MICRO 2024) publishes mean errors of 8.4% on one A100 node and 14.7% on up to 512 A100, with kernels"
    " profiled on such a node",
    "Charon (MLSys 2026, arXiv 2605.17164) publishes errors under 5.35%, and under 3.74% for training on more than"
    " 10,000 GPUs, on runs of its own",
)
"""What others publish on runs that are not public."""
_UNMEASURED = (
    (
        "CUDA context and loaded kernels (`context_bytes`)",
        "assumed from public figures; it depends on the driver and on which kernels a run loads",
    ),
    (
        "NCCL's buffers (`network/communicators.py`)",
        "counted from the source of NCCL, and compared with the few published figures of single communicators; they"
        " depend on the version, on its environment variables and on which algorithms it chooses",
    ),
    (
        "fragmentation (`fragmentation` and `irregular_fragmentation`)",
        "taken from published reserved and allocated peaks of the same runs, which are few; allocator settings were not"
        " compared",
    ),
    (
        "device memory as nvidia-smi shows it",
        "no run of this set reports it beside torch's own figures, so the last step, from reserved to device, is graded"
        " nowhere",
    ),
    (
        "the constants that `topoplan show profile` calls assumed",
        "the table below counts them; Hopper's grouped GEMMs and overlap, and most of Ada and Volta, are among them",
    ),
    (
        "runs that end out of memory",
        "none of this set did; what fits is graded by runs that did run",
    ),
)


def accuracy_page(graded: Validation) -> str:
    """The page. The same runs and formulas give the same text."""
    blocks = [
        f"{MARK}; change the formulas, then run `make accuracy` -->",
        "# Accuracy",
        _prose(
            "How far predictions are from runs that others measured and published. `make accuracy` writes this page"
            " from the rows in `topoplan/catalog/measured/`, and `topoplan validate --rows` prints every figure. A test"
            " compares the page with a fresh one."
        ),
        *_what_is_graded(graded),
        *_memory(graded),
        *_throughput(graded),
        *_order_and_fit(graded),
        *_inside_the_bands(graded),
        *_beside_others(graded),
        *_not_graded(graded),
        "## What was not measured",
        _prose("No GPU was at hand. These rest on public figures or on assumptions:"),
        _bulleted(f"**{what}**: {how}." for what, how in _UNMEASURED),
        *_bands(),
    ]
    return "\n\n".join(blocks) + "\n"


def _what_is_graded(graded: Validation) -> list[str]:
    return [
        "## What is graded",
        _prose(
            f"{counted(graded.runs, 'run')} with {counted(len(graded.figures), 'figure')}. Of Megatron-core: full"
            " fine-tuning, pretraining and a few runs of LoRA, dense and mixture-of-experts models, on A100, H100, H20,"
            " B200, GB200 and GB300. Of DDP, DeepSpeed and FSDP: full fine-tuning, pretraining and LoRA, dense models,"
            " on A100, H100 and H20. Each row names its source. Error is predicted over measured, less one: the median,"
            " the 90th percentile and the worst are of its size, and the signed median tells whether predictions"
            " are high (+) or low (-)."
        ),
        _prose(
            "This is no test on unseen data. The formulas of memory were written with the SimuMax B200 rows at hand,"
            " and the shares of fragmentation are medians over them: errors there are those of a fit. Time on that"
            " machine is predicted from its own kernel timings (`catalog/measured/simumax-b200.yaml`), as SimuMax does:"
            " its products are a fifth slower than those of other B200, on which the catalog's profile rests, and four"
            " constants of that file are fitted on step times of such rows. The two rates"
            " of eager PyTorch are chosen on step times of the FSDP rows, and the fragmentation of ddp,"
            " deepspeed and fsdp2 on reserved memory of torchtitan and ms-swift. For a new"
            " model or machine the errors of the other sources tell more."
        ),
    ]


def _memory(graded: Validation) -> list[str]:
    return [
        "## Memory",
        _bulleted(
            [
                "**allocated**: torch's peak of live tensors on the fullest GPU.",
                "**allocated, by stage**: the same, for each pipeline stage that was measured.",
                "**reserved**: what torch's allocator holds. Some sources round it to 1 GiB, or 1 GB.",
            ]
        ),
        _spread_table(spread for spread in graded.spreads if spread.kind in (ALLOCATED, BY_STAGE, RESERVED)),
        "Every figure:",
        _memory_rows(graded),
    ]


def _throughput(graded: Validation) -> list[str]:
    return [
        "## Throughput",
        _prose(
            "Tokens, or model FLOP/s where only those were published, per second and GPU. *Functional runs* are checks"
            " that a recipe works, with natural routing, short steps and safety checks on, and *CI* runs are"
            " deterministic: both are slower than the hardware allows. Most rows do not say how they recompute, overlap"
            " and dispatch, and are predicted without recomputation. *Summaries* of one layout differ by up to a factor"
            " of 2.8 from one software release to the next, which no formula here can know."
        ),
        _spread_table(spread for spread in graded.spreads if spread.kind not in (ALLOCATED, BY_STAGE, RESERVED)),
    ]


def _order_and_fit(graded: Validation) -> list[str]:
    blocks = []
    if graded.ranking is not None:
        blocks += ["## Order of layouts", _prose(ranking_sentence(graded.ranking))]
    blocks += ["## What fits", _prose(" ".join(fit_sentences(graded)))]
    if over := (*graded.fits.out_of_memory_but_fit, *graded.fits.ran_but_over):
        blocks += ["Predicted otherwise than they ended:", _bulleted(fit_line(grade) for grade in over)]
    return blocks


def _inside_the_bands(graded: Validation) -> list[str]:
    rows = (
        [
            f"`{one.key}`" if one.key.endswith("_band") else f"all of {one.key}",
            str(one.figures),
            percent(one.inside / one.figures),
            percent(one.inside_without_source / one.figures),
            percent(one.median_half_width),
        ]
        for one in coverages(graded.figures)
    )
    return [
        "## Inside the bands",
        _prose(
            "How many measured figures are inside the band that is printed around them. *Without its source*: inside"
            " the band that all other sources alone would give, which is what runs of yours may expect."
        ),
        _table(("band", "n", "inside", "without its source", "median half width"), rows, right=[1, 2, 3, 4]),
    ]


def _beside_others(graded: Validation) -> list[str]:
    rows = []
    for planner, family, kind, median, worst, calibrated in _OTHERS:
        ours = next((one for one in graded.spreads if (one.family, one.kind) == (family, kind)), None)
        if ours is not None:
            figures = [percent(ours.median), percent(ours.worst), planner, f"{median:.1f}%", f"{worst:.1f}%"]
            rows.append([family, kind, str(ours.count), *figures, calibrated])
    if not rows:
        return []
    return [
        "## Beside other planners",
        "On rows that they publish their own errors for:",
        _table(
            ("rows", "figure", "n", "median", "worst", "planner", "its median", "its worst", "calibrated on"),
            rows,
            right=[2, 3, 4, 6, 7],
        ),
        "On runs of their own, which nobody else can grade:",
        _bulleted(f"{line}." for line in _ALONE),
    ]


def _not_graded(graded: Validation) -> list[str]:
    blocks = [
        "## What is not graded",
        _prose(f"{counted(sum(graded.left_out.values()), 'row')} of the same sources, because:"),
        _table(("rows", "reason"), ([str(count), reason] for reason, count in graded.left_out.items()), right=[0]),
    ]
    if graded.failed:
        blocks += ["Not predicted:", _bulleted(f"{name}: {error}" for name, error in graded.failed.items())]
    return blocks


def _bands() -> list[str]:
    return [
        "## Where the numbers of each GPU come from",
        _prose(
            "`memory` and `time` are the half widths of the bands: the interval that a measured value is expected in is"
            " the prediction, less and plus that much. Memory has one for a dense model, one for a mixture of experts,"
            " one for adapters on Megatron and one for ddp, deepspeed and fsdp2; time one for a dense model in bf16, a"
            " mixture of experts, a dense model in fp8, and ddp, deepspeed and fsdp2. A plan fits when device memory"
            " and the memory band are within the card, unless the spec or `--margin` says otherwise."
        ),
        _prose(
            f"A band is earned: the 90th percentile of the errors of at least {FEW_FIGURES} figures, of which a source"
            f" counts as {FEW_FIGURES} at most. With fewer it"
            f" is that of the kin, times {WIDER_FOR_FEW:g}, or the median error where that is wider; with none, times"
            f" {WIDER_FOR_NONE:g}. The memory of adapters on Megatron, and that of ddp, deepspeed and fsdp2, is graded"
            " by the runs of all cards together. Speeds of runs that were slowed on purpose count for none, nor do"
            " those of adapters on Megatron, and of runs whose source leaves settings out only the fastest of a"
            " cluster, model and job does. No band is narrower than"
            f" {100 * NARROWEST['memory_band']:.0f}% of memory ({100 * NARROWEST['moe_memory_band']:.0f}% of a mixture"
            f" of experts) and {100 * NARROWEST['time_band']:.0f}% of time, or wider than {100 * WIDEST:.0f}%. A wide"
            " band means that little was measured, not that runs scatter that much. `topoplan validate --bands` works"
            " them out, and a test holds the catalog to it."
        ),
        _profiles(),
    ]


def _prose(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _bulleted(texts: Iterable[str]) -> str:
    return "\n".join(
        textwrap.fill(f"- {text}", _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for text in texts
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A Markdown table. `right`: the columns that are aligned to the right."""
    rule = ["---:" if column in right else "---" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def _spread_table(spreads: Iterable[Spread]) -> str:
    rows = (
        [
            spread.family,
            spread.kind,
            str(spread.count),
            percent(spread.median),
            percent(spread.at_90_percent),
            percent(spread.worst),
            signed_percent(spread.signed_median),
        ]
        for spread in spreads
    )
    return _table(("source", "figure", "n", "median", "90%", "worst", "signed median"), rows, right=range(2, 7))


def _memory_rows(graded: Validation) -> str:
    rows = (
        [
            f"`{figure.id}`",
            figure_name(figure),
            f"{figure.predicted:.2f}",
            f"{figure.measured:.2f}",
            signed_percent(figure.error),
        ]
        for figure in graded.figures
        if figure.kind in (ALLOCATED, BY_STAGE, RESERVED)
    )
    return _table(("run", "figure", "predicted", "measured", "error"), rows, right=range(2, 5))


def _profiles() -> str:
    rows = (
        [profile.name, profile.kin or "-", memory_bands(profile), time_bands(profile), kinds_text(profile)]
        for profile, _ in catalog_profiles()
    )
    return _table(("GPU", "kin", "memory", "time", "constants"), rows)
