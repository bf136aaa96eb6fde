"""A request's adapter must be in a slot, or there must be one for it."""

from penstock.api.load_report import WaitingReason
from penstock.engine.core.scheduling.admission.rule import Candidate
from penstock.engine.core.scheduling.lora.adapter_table import AdapterTable


class LoraSlots:
    """Refuses a request whose adapter is not on the device, while every slot is in use or its weights are being read."""

    def __init__(self, table: AdapterTable) -> None:
        self._table = table

    def refuses(self, candidate: Candidate) -> WaitingReason | None:
        """Why the candidate must wait."""
        request = candidate.request
        if request.adapter is None:
            return None
        return "lora" if self._table.refuses(request.adapter, request, candidate.now) else None
