"""A store in which processes that know a secret tell their values from those of strangers.

Whoever reaches a TCPStore can write to it: on a host, all its users. `torchring run` gives its ranks a secret in
their environment, which only their user can read. The secret itself is never in the store.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from torchring.errors import TopologyError

_SEAL_BYTES: Final = 64  # of SHA-256, in hexadecimal digits: some calls of a store take text only
_LOOK_SECONDS: Final = 0.002


def sealed(secret: str, key: str, value: bytes) -> bytes:
    """`value`, after an HMAC of its key and of itself: where it is copied to another key, the HMAC does not fit."""
    data = b"%d %b %b" % (len(key), key.encode(), value)
    return hmac.new(secret.encode(), data, hashlib.sha256).hexdigest().encode() + value


class SignedStore(Store):
    """Signs each value that is set, and refuses values that were not signed with the same secret.

    Counters of `add` are not signed, because the store itself adds. An old value of a key, put there again, is not
    noticed. Engines in C++ may call this store while this object lives.

    Raises TopologyError where a value is read that has no right signature.
    """

    def __init__(self, store: Store, secret: str, prefix: str = "") -> None:
        super().__init__()
        self.inner = store
        self.prefix = prefix
        self._secret = secret

    def within(self, name: str) -> SignedStore:
        return SignedStore(self.inner, self._secret, f"{self.prefix}{name}/")

    def set(self, key: str, value: str | bytes) -> None:
        self.inner.set(self.prefix + key, self._sealed(key, value))  # type: ignore[arg-type]  # takes bytes, too

    def get(self, key: str) -> bytes:
        return self._opened(key, self.inner.get(self.prefix + key))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected: Any = expected_value and self._sealed(key, expected_value)  # empty: if there is none
        desired: Any = self._sealed(key, desired_value)
        return self._opened(key, self.inner.compare_set(self.prefix + key, expected, desired))

    def check(self, keys: list[str]) -> bool:
        """Also refuses strangers' values: often the mere presence of a key says something."""
        return self.inner.check(self._names(keys)) and all(self.get(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Looks again and again: while TCPStore waits, no other call of this process gets through to it."""
        end = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not self.inner.check(self._names(keys)):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"nobody has set {', '.join(keys)} in time")
            time.sleep(_LOOK_SECONDS)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self.inner.multi_get(self._names(keys))
        return [self._opened(key, value) for key, value in zip(keys, values, strict=True)]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(self.prefix + key, amount)

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(self.prefix + key)

    def clone(self) -> SignedStore:
        return SignedStore(self.inner.clone(), self._secret, self.prefix)  # type: ignore[attr-defined]  # not in stubs

    @property
    def timeout(self) -> timedelta:
        return self.inner.timeout  # type: ignore[attr-defined, no-any-return]  # not in stubs

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self.prefix + key for key in keys]

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        return sealed(self._secret, self.prefix + key, value.encode() if isinstance(value, str) else value)

    def _opened(self, key: str, found: bytes) -> bytes:
        value = found[_SEAL_BYTES:]
        if not hmac.compare_digest(found, self._sealed(key, value)):
            raise TopologyError(
                f"the rendezvous store has a value under {self.prefix + key!r} that no process of this job has put "
                "there: another job may use the same address and port, or another user of the host or network may "
                "have written to the store. Start the job again; give each job a MASTER_PORT of its own, and see "
                "SECURITY.md"
            )
        return value


def signed(store: Store, secret: str) -> Store:
    """The store, signed if there is a secret."""
    return SignedStore(store, secret) if secret else store


def unsigned(store: Store) -> Store:
    """The same keys, for an engine that calls the store from threads of its own, also while Python ends."""
    return PrefixStore(store.prefix.rstrip("/"), store.inner) if isinstance(store, SignedStore) else store


def bottom(store: Store) -> Store:
    """The store of all keys."""
    while isinstance(store, (PrefixStore, SignedStore)):
        store = store.inner if isinstance(store, SignedStore) else store.underlying_store
    return store
