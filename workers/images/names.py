"""How an image is named in an error: enough to find it, without the secrets that a URL may carry."""

from __future__ import annotations

from pipeline.wire.messages import ImageRef

_SHOWN = 200  # characters of a name


def describe(ref: ImageRef) -> str:
    """For example "image 'a/b.png'" or "image http://host/b.png?… (sha256 0123456789ab…)"."""
    sources = [repr(_short(ref.path))] if ref.path else []
    if ref.url:
        sources.append(show_url(ref.url))
    digest = f"sha256 {_short(ref.sha256, 19)}" if ref.sha256 else ""
    if not sources:
        return f"image {digest or 'without a source'}"
    return f"image {' or '.join(sources)}" + (f" ({digest})" if digest else "")


def show_url(url: str) -> str:
    """The URL without user, password and query, which may be credentials; printable whatever it holds."""
    address, query, _ = url.partition("?")
    scheme, colon, rest = address.partition("://")
    authority, slash, path = rest.partition("/")
    shown = f"{scheme}{colon}{authority.rpartition('@')[2]}{slash}{path.partition('#')[0]}{query and '?…'}"
    return _short(shown).encode("unicode_escape").decode() if not shown.isprintable() else _short(shown)


def _short(text: str, limit: int = _SHOWN) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
