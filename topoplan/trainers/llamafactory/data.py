"""What LLaMA-Factory reads its samples by, whichever engine trains."""

from __future__ import annotations

from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.key_list import default_template
from topoplan.trainers.trainer import DATASET_TO_FILL_IN
from topoplan.trainers.usual import loaders, workers
from topoplan.trainers.yaml_text import Entry, Section

PADDED = "padded to the longest"
"""What becomes of samples that are not packed."""


def data_section(spec: Spec, order: str, *, padded: str = PADDED) -> Section:
    """The section; `order` says how samples are read, `padded` what becomes of those that are not packed."""
    job, model = spec.job, spec.model
    notes: list[str] = []
    comment = "a name in dataset_info.json; the spec has none" if job.dataset is None else order
    entries = [
        Entry(key="dataset", value=DATASET_TO_FILL_IN if job.dataset is None else job.dataset, comment=comment),
        Entry(key="dataset_dir", value=job.dataset_dir or "data", comment="holds dataset_info.json"),
    ]
    template = job.template or default_template(model.name, model.model_type)
    if template is not None:
        comment = "" if job.template else "LLaMA-Factory's choice for this model"
        entries.append(Entry(key="template", value=template, comment=comment))
    else:
        notes.append("template: not in the spec and not known for this model; the tokenizer's own is parsed instead")
    entries.append(Entry(key="cutoff_len", value=job.seq_len, comment="the seq_len that was planned for"))
    if job.stage == "pt" and job.packing:
        # DataArguments.__post_init__ takes one off cutoff_len for an explicit `packing: true`; the default of stage pt
        # is applied later, and run_pt adds the token that the shift of the labels takes.
        notes.append("packing: on by default in stage pt; written here it would cost a token of each sequence")
    elif job.stage == "pt":
        entries.append(Entry(key="packing", value=False, comment="stage pt packs unless told not to"))
    elif job.stage == "sft":
        comment = "samples share sequences; longer ones are cut" if job.packing else padded
        entries.append(Entry(key="packing", value=job.packing, comment=comment))
    if model.vision is not None:
        entries.append(Entry(key="image_max_pixels", value=job.image_max_pixels, comment="larger ones are scaled down"))
    entries += [
        Entry(
            key="preprocessing_num_workers",
            value=workers(spec.cluster),
            comment="processes that tokenise, once on each node",
        ),
        Entry(key="dataloader_num_workers", value=loaders(spec.cluster), comment="a GPU"),
    ]
    return Section(title="Data", entries=tuple(entries), notes=tuple(notes))
