"""Where versions travel through: what is refused by name, and that no credential is shown."""

from __future__ import annotations

import pytest

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.weights.object_store import said


@pytest.mark.parametrize(
    "changes",
    [
        "weights.transport=delta",
        "weights.transport=store weights.store_url=s3://bucket/folder",
        "weights.transport=delta weights.store_url=gs://bucket",
        "weights.transport=store weights.store_url=file:///shared/folder",
    ],
)
def test_what_may_be_set(changes: str) -> None:
    load_config(None, changes.split(), environ={})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("weights.transport=store", "weights.transport store without weights.store_url"),
        ("weights.store_url=s3://b/c", "weights.store_url s3://b/c with weights.transport directory has no effect"),
        ("weights.transport=store weights.store_url=/a/b", "'/a/b': must begin with s3://, gs:// or file://"),
        ("weights.transport=store weights.store_url=http://a/b", "must begin with s3://, gs:// or file://"),
        ("weights.transport=store weights.store_url=simplecache::s3://a", "must begin with s3://"),
        (
            "weights.transport=store weights.store_url=s3://me:hush@b/c",
            "'s3://b/c' has a credential or an option",
        ),
        ("weights.transport=store weights.store_url=s3://b/c?secret=hush", "'s3://b/c' has a credential"),
        ("weights.transport=delta weights.anchor_every=0", "weights.anchor_every must be > 0"),
        ("weights.transport=delta weights.store_timeout_s=600", "must be below weights.load_timeout_s 600"),
        ("weights.transport=delta weights.cache_gb=0", "weights.cache_gb must be > 0"),
        ("weights.transport=delta weights.store_timeout_s=0", "weights.store_timeout_s must be > 0"),
    ],
)
def test_what_is_refused(changes: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, changes.split(), environ={})
    assert words in str(caught.value)
    assert "hush" not in str(caught.value)


def test_an_error_of_a_store_shows_no_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    error = OSError("signed with hush-hush:\nGET /a?X-Amz-Credential=AKIA1&X-Amz-Signature=abc&part=3")
    assert said(error) == "OSError: signed with ***: GET /a?X-Amz-Credential=***&X-Amz-Signature=***&part=3"
