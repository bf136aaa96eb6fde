"""The dashboards, from the whole to the parts."""

from typing import Final

from monitoring.boards.autoscaler import AUTOSCALER
from monitoring.boards.engine import ENGINE
from monitoring.boards.envoy import ENVOY
from monitoring.boards.fleet import FLEET
from monitoring.boards.model import MODEL
from monitoring.boards.picker import PICKER
from monitoring.boards.tenants import TENANTS

BOARDS: Final = (FLEET, MODEL, ENGINE, PICKER, ENVOY, AUTOSCALER, TENANTS)
