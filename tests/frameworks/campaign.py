"""Real frameworks and trainers against bnexport: python -m tests.campaign frameworks [CASE ...].

A case is a function of a folder, which asserts. It runs in the environment "frameworks" of `environment`.
"""

import importlib
import json
import tempfile
from pathlib import Path

from tests.campaign.table import ROOT, Campaign, judged, told
from tests.frameworks.environment import Skipped
from tests.frameworks.planted_faults import PLANS

SECONDS = 3600
# Networks of parallel branches, and one whose arithmetic looks like a batch norm.
BRANCHES = ("repvgg_a0", "mobileone_s0", "fastvit_t8", "repvit_m0_9", "repghostnet_050", "poolformer_s12")
CASES = (
    "inplace_abn.the_conversion_equals_it",
    "mmcv_norm.one_training_step_equals_mmcv",
    "mmcv_norm.a_file_of_its_own_symbolic",
    "mmcv_operators.definitions_are_those_of_the_kernels",
    "mmdet3d.two_processes",
    *(f"timm_networks.parallel_branches {name}" for name in BRANCHES),
    "timm_networks.the_stand_ins_have_the_attributes_of_the_classes",
    *(f"planted_faults.{kind} {name}" for name in PLANS for kind in ("right", "wrong")),
    "model_names.a_model_of_each_library",
    "model_names.mmcvs_own_class_needs_no_group",
    "pages.mmsegmentation",
    "pages.timm",
    "pages.mmdetection",
    "pages.trainers",
)


def warm() -> None:
    """Nothing: some cases need MMCV with its operators, others without."""


def run(name: str, place: Path, _: list[str]) -> None:
    path, *arguments = name.split()
    module, function = path.split(".")
    row = {"name": name, "status": "passed"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            getattr(importlib.import_module(f"tests.frameworks.{module}"), function)(*arguments, Path(folder))
        except Skipped as error:
            row |= {"status": "skipped", "said": str(error)}
    place.write_text(json.dumps(row))


CAMPAIGN = Campaign(
    cases=lambda: CASES,
    trial=__name__,
    results=ROOT / "build/campaign/frameworks.json",
    environment="frameworks",
    verdict=judged,
    line=told,
)
