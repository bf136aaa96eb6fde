"""The generated protobuf packages: private names in the process, public names on the wire."""

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2

from penstock.epp_conformance._pb.envoy.config.core.v3 import address_pb2 as suites_address_pb2
from penstock.epp_conformance._pb.envoy.service.ext_proc.v3 import external_processor_pb2_grpc as suites_pb2_grpc
from penstock.gateway._pb.envoy.config.core.v3 import address_pb2
from penstock.gateway._pb.envoy.config.listener.v3 import listener_pb2
from penstock.gateway._pb.envoy.config.route.v3 import route_components_pb2
from penstock.gateway._pb.envoy.service.discovery.v3 import ads_pb2_grpc
from penstock.gateway._pb.envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from penstock.gateway.xds.anys import pack


class _Channel:
    """Collects the method paths that a stub asks for."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def stream_stream(self, path: str, **_: object) -> None:
        self.paths.append(path)


def test_type_urls_and_method_paths_are_public() -> None:
    assert pack(listener_pb2.Listener()).type_url == "type.googleapis.com/envoy.config.listener.v3.Listener"
    channel = _Channel()
    ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel)
    external_processor_pb2_grpc.ExternalProcessorStub(channel)
    assert channel.paths == [
        "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources",
        "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources",
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
    ]


def test_another_copy_of_the_same_proto_can_be_loaded() -> None:
    foreign = descriptor_pb2.FileDescriptorProto(name="envoy/config/core/v3/address.proto", package="envoy.config.core.v3")
    foreign.message_type.add(name=address_pb2.Address.DESCRIPTOR.name)
    descriptor_pool.Default().AddSerializedFile(foreign.SerializeToString())


def test_the_conformance_suites_copy_is_another_with_the_same_wire() -> None:
    assert suites_address_pb2.Address.DESCRIPTOR is not address_pb2.Address.DESCRIPTOR
    channel = _Channel()
    suites_pb2_grpc.ExternalProcessorStub(channel)
    assert channel.paths == ["/envoy.service.ext_proc.v3.ExternalProcessor/Process"]


def test_well_known_types_are_the_librarys() -> None:
    action = route_components_pb2.RouteAction(timeout=duration_pb2.Duration(seconds=3))
    assert action.timeout.__class__ is duration_pb2.Duration
