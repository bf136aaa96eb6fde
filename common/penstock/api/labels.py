"""Labels, annotations and port names on Kubernetes objects that Penstock makes or reads, named once."""

from typing import Final

GROUP: Final = "penstock.dev"
VERSION: Final = "v1alpha1"

MODEL: Final = "penstock.dev/model"
"""Name of the InferenceModel that a pod, Deployment or Service belongs to."""
POOL: Final = "penstock.dev/pool"
"""Name of the pool within the model."""
ROLE: Final = "penstock.dev/role"
REVISION: Final = "penstock.dev/revision"
"""Hash of everything that decides what a replica runs."""
CORDONED: Final = "penstock.dev/cordoned"
"""Annotation on a pod, `"true"`: a victim of scale-in that must not be picked any more."""

# Named container ports of an engine pod.
HTTP_PORT: Final = "http"
EVENTS_PORT: Final = "events"
REPLAY_PORT: Final = "replay"
