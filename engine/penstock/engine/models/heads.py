"""Which class serves which kind of draft head."""

from penstock.engine.models.build import Build
from penstock.engine.models.draft_head import DraftHead
from penstock.engine.models.eagle import Eagle1Head, Eagle3Head
from penstock.engine.models.head_config import HeadConfig
from penstock.engine.models.mtp import MtpHead

_CLASSES = {"eagle": Eagle1Head, "eagle3": Eagle3Head, "mtp": MtpHead}


def draft_head(config: HeadConfig, build: Build) -> DraftHead:
    """A head of the kind that the checkpoint has, without weights."""
    return _CLASSES[config.kind](config, build)
