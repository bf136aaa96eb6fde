"""TLS from Envoy to replicas: the files are on Envoy's machine, named by secrets, so that they are read again when renewed."""

from pathlib import Path

from penstock.gateway._pb.envoy.config.core.v3.base_pb2 import DataSource, TransportSocket, WatchedDirectory
from penstock.gateway._pb.envoy.extensions.transport_sockets.tls.v3.common_pb2 import (
    CertificateValidationContext,
    SubjectAltNameMatcher,
    TlsCertificate,
    TlsParameters,
)
from penstock.gateway._pb.envoy.extensions.transport_sockets.tls.v3.secret_pb2 import SdsSecretConfig, Secret
from penstock.gateway._pb.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import CommonTlsContext, UpstreamTlsContext
from penstock.gateway._pb.envoy.type.matcher.v3.string_pb2 import StringMatcher
from penstock.gateway.xds.ads import ADS
from penstock.gateway.xds.anys import pack
from penstock.http.replica_tls import CA, CERTIFICATE, KEY, ReplicaTls

AUTHORITY_NAME = "penstock_replica_ca"
CLIENT_NAME = "penstock_replica_client"


def secrets(tls: ReplicaTls) -> list[Secret]:
    """Return the CA of the replicas, and the certificate that Envoy presents to them."""
    authority = CertificateValidationContext(trusted_ca=_file(tls.folder / CA), watched_directory=_watched(tls.folder))
    known = [Secret(name=AUTHORITY_NAME, validation_context=authority)]
    if tls.presents:
        own = TlsCertificate(
            certificate_chain=_file(tls.folder / CERTIFICATE),
            private_key=_file(tls.folder / KEY),
            watched_directory=_watched(tls.folder),
        )
        known.append(Secret(name=CLIENT_NAME, tls_certificate=own))
    return known


def transport_socket(tls: ReplicaTls) -> TransportSocket:
    """Return a cluster's TLS socket. Until its secrets are there it connects to no replica, and never in clear."""
    kinds = (SubjectAltNameMatcher.DNS, SubjectAltNameMatcher.IP_ADDRESS)
    names = [
        SubjectAltNameMatcher(san_type=kind, matcher=StringMatcher(exact=tls.name)) for kind in kinds if tls.name is not None
    ]
    common = CommonTlsContext(
        alpn_protocols=["http/1.1"],
        tls_params=TlsParameters(
            tls_minimum_protocol_version=TlsParameters.TLSv1_2,
            tls_maximum_protocol_version=TlsParameters.TLSv1_3,  # as a client Envoy would stop at 1.2
        ),
        combined_validation_context=CommonTlsContext.CombinedCertificateValidationContext(
            default_validation_context=CertificateValidationContext(match_typed_subject_alt_names=names),
            validation_context_sds_secret_config=SdsSecretConfig(name=AUTHORITY_NAME, sds_config=ADS),
        ),
        tls_certificate_sds_secret_configs=[SdsSecretConfig(name=CLIENT_NAME, sds_config=ADS)] if tls.presents else [],
    )
    config = UpstreamTlsContext(common_tls_context=common, sni=tls.name or "")
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=pack(config))


def _file(path: Path) -> DataSource:
    return DataSource(filename=str(path))


def _watched(folder: Path) -> WatchedDirectory:
    return WatchedDirectory(path=str(folder))
