"""Whether a resource can be acted on, and in what words it cannot."""

from pydantic import BaseModel, ValidationError

from penstock.api.resources import InferenceModel, unsupported
from penstock.api.resources.faults import faults
from penstock.operator.autoscale.schedule import ScheduleError
from penstock.operator.autoscale.spec import model_limits
from penstock.operator.objects import Object
from penstock.operator.observed import Refusal


def accept(resource: Object) -> tuple[InferenceModel | None, Refusal | None]:
    """The model, and why it is not acted on."""
    try:
        model = InferenceModel.parse(resource)
    except ValueError as error:  # pydantic's are, too
        return None, Refusal("InvalidSpec", sentence(error))
    try:
        model_limits(model)
    except ScheduleError as error:
        return model, Refusal("InvalidSpec", str(error))
    paths = unsupported(model.spec)
    if paths:
        return model, Refusal("UnsupportedField", f"this version does not implement {', '.join(paths)}: remove what is named")
    return model, None


def sentence(error: ValueError, kind: type[BaseModel] = InferenceModel) -> str:
    """What is wrong with a resource of this kind, field by field."""
    return faults(error, kind) if isinstance(error, ValidationError) else str(error)
