"""The operator's stores: where they are read from, and that their secrets are never shown."""

from pathlib import Path

import pytest

from dsec.images.settings import ImagesSettings, load_stores
from dsec.model.errors import InvalidArgument

SECRET = "s3cr3t-of-the-store"
FILE = f"""
[main]
url = "s3://layers/prod/"
endpoint = "http://127.0.0.1:9000"
access_key = "AK"
secret_key = "{SECRET}"
allow_http = true
[mirror]
url = "file:///srv/layers"
"""


def written(tmp_path: Path, text: str, mode: int = 0o600) -> ImagesSettings:
    file = tmp_path / "stores.toml"
    file.write_text(text)
    file.chmod(mode)
    return ImagesSettings(stores=str(file))


def test_stores_are_found_by_name_and_by_url(tmp_path: Path) -> None:
    stores = load_stores(written(tmp_path, FILE))
    assert [store.url for store in stores.all()] == ["s3://layers/prod", "file:///srv/layers"]
    assert stores.find("main").secret_key == SECRET
    assert stores.find("s3://layers/prod") is stores.find("main")
    assert stores.find("oci://host/repository").secret_key == ""
    with pytest.raises(InvalidArgument, match="neither a store's URL nor a configured store"):
        stores.find("nobody")


def test_the_first_store_of_the_settings_is_asked_first(tmp_path: Path) -> None:
    settings = written(tmp_path, FILE)
    first = ImagesSettings(stores=settings.stores, store="file:///srv/other")
    assert load_stores(first).all()[0].url == "file:///srv/other"
    again = ImagesSettings(stores=settings.stores, store="file:///srv/layers")
    assert [store.url for store in load_stores(again).all()] == ["file:///srv/layers", "s3://layers/prod"]
    assert load_stores(ImagesSettings()).all() == []


def test_a_secret_is_in_no_text(tmp_path: Path) -> None:
    store = load_stores(written(tmp_path, FILE)).find("main")
    assert SECRET not in repr(store) and SECRET not in f"{[store]}"


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        (FILE, 0o644),
        (FILE + "[", 0o600),
        (f'[a]\nurl = "file:///x"\nsecret_key = ["{SECRET}"]', 0o600),
        (f'[a]\nurl = "file:///x"\nsecrets = "{SECRET}"', 0o600),
        (f'a = "{SECRET}"', 0o600),
        (f'[a]\nurl = "gopher://{SECRET}"', 0o600),
        ('[a]\nendpoint = "x"', 0o600),
    ],
)
def test_a_wrong_file_is_refused_without_a_value_of_it(tmp_path: Path, text: str, mode: int) -> None:
    with pytest.raises(InvalidArgument) as refused:
        load_stores(written(tmp_path, text, mode))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [{"store": "/srv/layers"}, {"cache_high_mb": 10, "cache_low_mb": 11}, {"cache_low_mb": -1}, {"wait_seconds": 0.0}],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        ImagesSettings(**wrong)  # type: ignore[arg-type]
