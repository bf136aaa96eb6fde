"""The secret that replicas share to move pages. Light to import: the frontend reads it, too."""

from pathlib import Path

from penstock.engine.config import ConfigError

_LEAST_SECRET = 16


def read_secret(path: Path) -> bytes:
    """Return the shared secret, without white space around it; `ConfigError` where it is no file or too short."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--kv-transfer-secret-file {path} cannot be read: {error.strerror}") from error
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(f"--kv-transfer-secret-file {path} has {len(secret)} bytes; a secret has at least {_LEAST_SECRET}")
    return secret
