"""How tenants and salts make namespaces."""

from __future__ import annotations

from itertools import combinations

import pytest

from scheduler.misses import tenant_of
from srt.namespaces import namespace_of, shown


def test_no_two_pairs_of_tenant_and_salt_share_a_namespace() -> None:
    tenants = ["", "a", "salt:a", "a:b"]
    salts = [None, "a", "salt:a", "\x1f", "a\x1fsalt:a"]
    names = [namespace_of(tenant, salt) for tenant in tenants for salt in salts]
    assert all(one != other for one, other in combinations(names, 2))
    with pytest.raises(ValueError, match="unit separator"):
        namespace_of("a\x1fb", None)


def test_the_tenant_of_a_namespace_is_known_and_not_shown() -> None:
    for tenant in ("", "a"):
        for salt in (None, "a", "x\x1fy"):
            assert tenant_of(namespace_of(tenant, salt)) == tenant
            assert shown(namespace_of(tenant, salt)) == ("" if salt is None else f"salt:{salt}")
