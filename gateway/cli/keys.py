"""`facet keys create | list | revoke`. Works on the data folder's store, also while a gateway runs.

Read next: `gateway/tenants.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.context import DataDir, settings_with, with_keys
from gateway.cli.output import AsJson, fail, print_json

if TYPE_CHECKING:
    from gateway.stores.base import KeyRecord

app = typer.Typer(no_args_is_help=True, help="Virtual keys: who may ask.")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="A name for people to know it by.")],
    tenant: Annotated[str, typer.Option(help="Who pays.")] = "default",
    admin: Annotated[bool, typer.Option("--admin", help="May use admin routes.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown once and stored only as a keyed hash."""
    if not name.strip() or not tenant.strip():
        raise typer.BadParameter("a key needs a name and a tenant that are not empty")
    settings = settings_with(data_dir=data_dir)
    record, plaintext = with_keys(
        settings, lambda keys: keys.create(name, tenant=tenant, role="admin" if admin else "user")
    )
    if as_json:
        print_json({**public(record), "key": plaintext})
    else:
        print(plaintext)


@app.command("list")
def list_keys(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show all keys, without their secrets."""
    from datetime import UTC, datetime

    records = with_keys(settings_with(data_dir=data_dir), lambda keys: keys.list())
    if as_json:
        print_json([public(record) for record in records])
        return
    for record in records:
        made = datetime.fromtimestamp(record.created_s, UTC).strftime("%Y-%m-%d %H:%M")
        state = "active" if record.revoked_s is None else "revoked"
        print(f"{record.id}  {state:8} {record.role:6} {record.tenant:16} {made}  {record.name}")


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The id that `facet keys list` shows.")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """End a key; running gateways notice within a second."""
    done = with_keys(settings_with(data_dir=data_dir), lambda keys: keys.revoke(key_id))
    if not done:
        raise fail(f"there is no active key {key_id!r}; `facet keys list` shows what there is.")
    if as_json:
        print_json({"id": key_id, "revoked": True})
    else:
        print(f"revoked {key_id}")


def public(record: KeyRecord) -> dict[str, object]:
    """A record without its digest."""
    import msgspec

    fields: dict[str, object] = msgspec.to_builtins(record)
    del fields["digest"]
    return fields
