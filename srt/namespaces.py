"""The cache namespace of a request: what separates cached prefixes beside their tokens.

A namespace is written `tenant`, or `tenant US salt:SALT` with the control character US (unit separator) between the
parts.  The tenant comes first, so that reports can tell what belongs to the same tenant.
"""

from __future__ import annotations

from srt.messages import NAMESPACE_SEPARATOR

# Where the pages of declared public heads are kept.  It belongs to the tenant without a name, and is nobody's salt.
PUBLIC = f"{NAMESPACE_SEPARATOR}public"


def namespace_of(tenant: str, salt: str | None) -> str:
    """The namespace of a tenant's requests with this salt.  Raises ValueError for a tenant with a separator in it."""
    if NAMESPACE_SEPARATOR in tenant:
        raise ValueError("the name of a tenant cannot hold a unit separator")
    # The prefix keeps a salt from ever being the same as a part of another kind.
    return tenant if salt is None else f"{tenant}{NAMESPACE_SEPARATOR}salt:{salt}"


def shown(namespace: str) -> str:
    """A namespace as its tenant is told of it: without the tenant; empty for what has no salt."""
    return namespace.partition(NAMESPACE_SEPARATOR)[2]
