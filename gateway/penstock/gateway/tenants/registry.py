"""Keys, tenants and their accounts."""

import hashlib
import secrets
import time
from collections.abc import Iterator

from penstock.gateway.tenants.account import Account
from penstock.gateway.tenants.document import ANONYMOUS, TenantsFile, digest
from penstock.gateway.tenants.tenant import Limits, Tenant


class Registry:
    """The tenants of a file, replaced as a whole when the file changes. Accounts persist by name.

    A key is found by a keyed hash, under a secret of this process, of the key's SHA-256. The time of the lookup depends neither
    on the key nor on how much of it is right, since no client can find two keys with similar hashes.
    """

    def __init__(self, file: TenantsFile) -> None:
        self._secret = secrets.token_bytes(32)
        self._tenants: dict[bytes, Tenant] = {}
        self._accounts: dict[str, Account] = {}
        self.anonymous: Tenant | None = None
        """Tenant of requests without a key. None: they are refused."""
        self.pass_keys = False
        """Whether replicas get to see the client's key."""
        self.replace(file)

    def replace(self, file: TenantsFile) -> None:
        """Takes in another content of the file."""
        now = time.monotonic()
        self.pass_keys = file.pass_keys
        self.anonymous = None
        if file.anonymous != "deny":
            limits = file.anonymous if isinstance(file.anonymous, Limits) else Limits()
            self.anonymous = Tenant(name=ANONYMOUS, limits=limits)
        self._tenants = {}
        named = [self.anonymous] if self.anonymous is not None else []
        for entry in file.tenants:
            tenant = Tenant(name=entry.name, limits=entry.limits)
            named.append(tenant)
            self._tenants.update((self._mark(digest(key)), tenant) for key in entry.keys)
        before, self._accounts = self._accounts, {}
        for tenant in named:
            account = before.get(tenant.name)
            if account is None:
                account = Account(tenant.limits, now)
            else:
                account.limit(tenant.limits, now)
            self._accounts[tenant.name] = account

    def find(self, key: str) -> Tenant | None:
        """Return the tenant with this key, or None."""
        return self._tenants.get(self._mark(hashlib.sha256(key.encode(errors="surrogateescape")).digest()))

    def account(self, tenant: Tenant) -> Account | None:
        """The tenant's; None where it was removed from the file a moment ago."""
        return self._accounts.get(tenant.name)

    def accounts(self) -> Iterator[tuple[str, Account]]:
        """All, by the names of their tenants."""
        yield from self._accounts.items()

    def _mark(self, hashed: bytes) -> bytes:
        return hashlib.blake2b(hashed, key=self._secret, digest_size=16).digest()
