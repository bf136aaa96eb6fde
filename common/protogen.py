"""Generates private packages from the descriptors of Envoy's API in `xds-protos`: the gateway's and the conformance suite's.

Usage: `python common/protogen.py OUTDIR`, in an environment of its own (`requirements/protogen.txt`): xds-protos must not be
installed where Penstock runs, since it overwrites modules of other packages. The end of OUTDIR says which package it is.

What is generated collides with nobody: files live under the package's folder, and protobuf packages get its prefix, so that
another copy of Envoy's or Google's protos in the process has other names in protobuf's descriptor pool. The wire never sees the
prefix: messages carry no names, gRPC method paths are generated without it, and `penstock.gateway.xds.anys.pack` leaves it out
of type URLs.
"""

import importlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from grpc_tools import protoc

LIBRARY = "google/protobuf/"  # the protobuf library's own files stay what they are


@dataclass(frozen=True)
class Package:
    """One private copy."""

    folder: str
    prefix: str
    roots: tuple[str, ...]
    """What the owner imports; the package has everything that their types come from too."""


PACKAGES = (
    Package(
        folder="penstock/gateway/_pb/",
        prefix="penstock_pb.",
        roots=(
            "envoy/service/accesslog/v3/als",
            "envoy/service/discovery/v3/ads",
            "envoy/service/ext_proc/v3/external_processor",
            "envoy/config/cluster/v3/cluster",
            "envoy/config/endpoint/v3/endpoint",
            "envoy/config/listener/v3/listener",
            "envoy/config/route/v3/route",
            "envoy/config/trace/v3/opentelemetry",
            "envoy/extensions/access_loggers/filters/cel/v3/cel",
            "envoy/extensions/access_loggers/grpc/v3/als",
            "envoy/extensions/access_loggers/stream/v3/stream",
            "envoy/extensions/filters/http/ext_proc/v3/ext_proc",
            "envoy/extensions/filters/http/header_mutation/v3/header_mutation",
            "envoy/extensions/filters/http/router/v3/router",
            "envoy/extensions/filters/network/http_connection_manager/v3/http_connection_manager",
            "envoy/extensions/http/early_header_mutation/header_mutation/v3/header_mutation",
            "envoy/extensions/load_balancing_policies/override_host/v3/override_host",
            "envoy/extensions/load_balancing_policies/round_robin/v3/round_robin",
            "envoy/extensions/retry/priority/previous_priorities/v3/previous_priorities_config",
            "envoy/extensions/retry/host/previous_hosts/v3/previous_hosts",
            "envoy/extensions/transport_sockets/tls/v3/tls",
            "envoy/extensions/upstreams/http/v3/http_protocol_options",
            "envoy/data/accesslog/v3/accesslog",
            "opentelemetry/proto/collector/trace/v1/trace_service",
            "xds/data/orca/v3/orca_load_report",
        ),
    ),
    Package(
        folder="penstock/epp_conformance/_pb/",
        prefix="penstock_epp_conformance_pb.",
        roots=("envoy/service/ext_proc/v3/external_processor",),
    ),
)


def main(outdir: Path) -> None:
    """Replaces `outdir` by the generated package; ValueError where it is the folder of none."""
    package = _package(outdir)
    files = _closure(importlib.import_module(root.replace("/", ".") + "_pb2").DESCRIPTOR for root in package.roots)
    descriptors = [_rename(_prune(file), package) for file in files]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        _compile(descriptors, package, scratch)
        shutil.rmtree(outdir, ignore_errors=True)
        shutil.copytree(scratch / package.folder, outdir)


def _package(outdir: Path) -> Package:
    for package in PACKAGES:
        if f"{outdir.resolve().as_posix()}/".endswith(f"/{package.folder}"):
            return package
    raise ValueError(f"{outdir} is none of {', '.join(package.folder for package in PACKAGES)}")


def _closure(roots: Iterator[FileDescriptor]) -> list[FileDescriptor]:
    """The roots and every file that their types come from, dependencies first."""
    found: dict[str, FileDescriptor] = {}

    def visit(file: FileDescriptor) -> None:
        if file.name in found:
            return
        used = _used_files(file)
        for dependency in file.dependencies:
            if dependency.name in used:
                visit(dependency)
        found[file.name] = file

    for root in roots:
        visit(root)
    return list(found.values())


def _type_names(message: Message) -> Iterator[str]:
    """Every reference to a type in a descriptor, each as `.package.Type`."""
    for field, value in message.ListFields():
        if field.name in ("type_name", "input_type", "output_type"):
            yield value
        elif field.message_type and field.name != "options":
            for child in value if field.is_repeated else [value]:
                yield from _type_names(child)


def _used_files(file: FileDescriptor) -> set[str]:
    """The files that `file` needs for its types: most of Envoy's imports serve annotations only."""
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    names = (name.removeprefix(".") for name in _type_names(proto))
    return {_file_of(file, name) for name in names}


def _file_of(file: FileDescriptor, type_name: str) -> str:
    return file.pool.FindFileContainingSymbol(type_name).name


def _prune(file: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    """The file without custom options (validation rules, annotations) and without the imports that only these need."""
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    used = _used_files(file)
    if file.public_dependencies:
        raise ValueError(f"{file.name}: public imports are not supported")
    del proto.dependency[:]
    proto.dependency.extend(dependency.name for dependency in file.dependencies if dependency.name in used)
    _strip_options(proto)
    return proto


def _strip_options(message: Message) -> None:
    for field, value in message.ListFields():
        if field.name == "options" and field.message_type:
            for option, _ in value.ListFields():
                if option.is_extension:
                    value.ClearExtension(option)
            value.DiscardUnknownFields()
        elif field.message_type:
            for child in value if field.is_repeated else [value]:
                _strip_options(child)


def _rename(proto: descriptor_pb2.FileDescriptorProto, package: Package) -> descriptor_pb2.FileDescriptorProto:
    """The file under its private name, with private package and references."""
    if proto.name.startswith(LIBRARY):
        return proto
    proto.name = package.folder + proto.name
    proto.package = package.prefix + proto.package
    renamed = [name if name.startswith(LIBRARY) else package.folder + name for name in proto.dependency]
    del proto.dependency[:]
    proto.dependency.extend(renamed)
    _rename_types(proto, package.prefix)
    return proto


def _rename_types(message: Message, prefix: str) -> None:
    for field, value in message.ListFields():
        if field.name in ("type_name", "input_type", "output_type"):
            if not value.startswith(".google.protobuf."):
                setattr(message, field.name, f".{prefix}{value.removeprefix('.')}")
        elif field.message_type and field.name != "options":
            for child in value if field.is_repeated else [value]:
                _rename_types(child, prefix)


def _compile(descriptors: list[descriptor_pb2.FileDescriptorProto], package: Package, out: Path) -> None:
    """Runs protoc into `out`; raises RuntimeError when it fails."""
    descriptor_set = out / "descriptors.pb"
    descriptor_set.write_bytes(descriptor_pb2.FileDescriptorSet(file=descriptors).SerializeToString())
    names = [proto.name for proto in descriptors if proto.name.startswith(package.folder)]
    with_services = [proto.name for proto in descriptors if proto.service]
    common = ["protoc", f"--descriptor_set_in={descriptor_set}"]
    for arguments in ([f"--python_out={out}", f"--pyi_out={out}", *names], [f"--grpc_python_out={out}", *with_services]):
        if protoc.main([*common, *arguments]) != 0:
            raise RuntimeError("protoc failed; its message is above")
    for stub in out.rglob("*_pb2_grpc.py"):
        # Method paths are the one place where a package's name is on the wire.
        stub.write_text(stub.read_text().replace(f"'{package.prefix}", "'").replace(f"'/{package.prefix}", "'/"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: protogen.py OUTDIR")
    main(Path(sys.argv[1]))
