"""All that a client does with a sandbox, in one order: what the places of a running server are met by."""

import asyncio
from contextlib import suppress

import dsec
from dsec.model.errors import InvalidArgument, NotFound
from dsec.testing.witness import Subject, Witness

__all__ = ["scenario"]


async def scenario(witness: Witness, client: dsec.DSecClient) -> None:
    """From a creation to its end, beside the sandboxes that are there."""
    others = [each for each in witness.subjects.values() if each.whole]
    readers = [asyncio.get_running_loop().create_task(witness.read(each)) for each in others]
    try:
        await _one_life(witness, client)
        await asyncio.sleep(1.3)  # activity is written down once a second, and the journal trimmed at its interval
    finally:
        for reader in readers:
            reader.cancel()
        found = await asyncio.gather(*readers, return_exceptions=True)
    for error in found:
        if isinstance(error, Exception):
            raise error


async def _one_life(witness: Witness, client: dsec.DSecClient) -> None:
    mounts = [dsec.MountSpec(target="/shared", volume="shared")]
    subject = await witness.create(client, mounts=mounts)
    await _commands(witness, subject)
    await _processes(witness, subject)
    await _files(witness, subject)
    box = witness.box(subject)
    await box.renew(200.0)
    await box.events()
    await box.metrics()
    await box.info()
    link = await box.preview(8000)
    assert [each.id for each in await box.previews()] == [link.id]
    await box.revoke_preview(link.id)
    with suppress(NotFound):
        await client.run_container(dsec.DSecContainerRunArgs(container_image="no-such-image"))
    await _many(witness, client)
    await witness.stop(subject)


async def _commands(witness: Witness, subject: Subject) -> None:
    box = witness.box(subject)
    await witness.run(subject)
    with suppress(InvalidArgument):
        await box.exec(["/bin/true"], timeout=-1.0)
    result = await box.exec(["/bin/sh", "-c", "exit 3"])
    assert result.exit_code == 3
    session = await box.open_session()
    assert (await session.run("echo in a session")).text == "in a session\n"
    await box.sessions()
    await session.close()


async def _processes(witness: Witness, subject: Subject) -> None:
    key = witness.name("process")
    process = await witness.start(subject, "sleep 1000", key)
    await process.info()
    await process.signal(18)
    await process.wait(timeout=0.01)
    await witness.box(subject).processes()
    await witness.end(subject, key)


async def _files(witness: Witness, subject: Subject) -> None:
    await witness.write(subject)
    files = witness.box(subject).files
    await files.mkdir("/tmp/folder")
    await files.write("/tmp/folder/one", b"1")
    await files.move("/tmp/folder/one", "/tmp/folder/two")
    assert await files.read("/tmp/folder/two") == b"1"
    await files.list("/tmp/folder")
    await files.stat("/tmp/folder/two")
    await files.remove("/tmp/folder/two")


async def _many(witness: Witness, client: dsec.DSecClient) -> None:
    """A batch, stopped together. What a kill leaves of it ends with its job."""
    job = witness.name("batch")
    witness.jobs.append(job)
    args = dsec.DSecContainerRunArgs(container_image="other", memory_limit_mb=64, job=job)
    made = [each async for each in client.run_containers(args, 2, request_id=job)]
    assert all(isinstance(each, dsec.Sandbox) for each in made), made
    await client.stop_many(job=job)
    witness.jobs.remove(job)
