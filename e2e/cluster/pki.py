"""Keys, certificates and kubeconfigs of one cluster, made with openssl."""

import json
from pathlib import Path

from e2e.cluster.commands import run
from e2e.cluster.network import GATEWAY

API_PORT = 6443
API_URL = f"https://127.0.0.1:{API_PORT}"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")
_SERVER_NAMES = (
    f"IP:127.0.0.1,IP:10.96.0.1,IP:{GATEWAY},DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
)


class Pki:
    """One authority for the cluster, one for aggregated API servers, and who they vouch for.

    Files lie in `state/pki`; kubeconfigs, as JSON (which is YAML, so that every client reads it), in `state`.
    """

    def __init__(self, state: Path) -> None:
        self.state = state
        self.folder = state / "pki"

    def create(self) -> None:
        self.folder.mkdir(mode=0o700)
        for authority in ("ca", "front-proxy-ca"):
            self._create_authority(authority)
        self._issue("apiserver", "ca", "/CN=kube-apiserver", f"subjectAltName={_SERVER_NAMES}")
        self._issue("front-proxy-client", "front-proxy-ca", "/CN=front-proxy-client", "extendedKeyUsage=clientAuth")
        run("openssl", "genrsa", "-out", self.folder / "service-account.key", "2048")
        run("openssl", "rsa", "-in", self.folder / "service-account.key", "-pubout", "-out", self.folder / "service-account.pub")
        self.create_client("admin", "/O=system:masters/CN=admin")
        self.create_client("coredns", "/O=system:masters/CN=coredns")
        for component in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
            self.create_client(component, f"/CN=system:{component}")

    def create_client(self, name: str, subject: str) -> Path:
        """A client certificate for that subject; its kubeconfig."""
        self._issue(name, "ca", subject, "extendedKeyUsage=clientAuth")
        user = {"client-certificate": str(self.folder / f"{name}.crt"), "client-key": str(self.folder / f"{name}.key")}
        return self.write_kubeconfig(name, user)

    def create_server(self, name: str) -> tuple[Path, Path, Path]:
        """A certificate for a server of that DNS name: it, its key, and the authority's."""
        self._issue(name, "ca", "/CN=server", f"subjectAltName=DNS:{name}")
        return self.folder / f"{name}.crt", self.folder / f"{name}.key", self.folder / "ca.crt"

    def write_kubeconfig(self, name: str, user: dict[str, str]) -> Path:
        cluster = {"server": API_URL, "certificate-authority": str(self.folder / "ca.crt")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "testbed",
            "clusters": [{"name": "testbed", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": name}}],
        }
        path = self.kubeconfig(name)
        path.touch(mode=0o600)
        path.write_text(json.dumps(config))
        return path

    def kubeconfig(self, name: str) -> Path:
        return self.state / f"{name}.kubeconfig"

    def _create_authority(self, name: str) -> None:
        key, certificate = self.folder / f"{name}.key", self.folder / f"{name}.crt"
        usage = ("-addext", "keyUsage=critical,keyCertSign,digitalSignature")
        run("openssl", "req", "-x509", *_KEY, "-days", "365", "-subj", f"/CN={name}", "-keyout", key, "-out", certificate, *usage)

    def _issue(self, name: str, authority: str, subject: str, extension: str) -> None:
        """A key and a certificate signed by that authority."""
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        common = "basicConstraints=CA:false\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\nkeyUsage=digitalSignature"
        extensions.write_text(f"{common}\n{extension}\n")
        run("openssl", "req", *_KEY, "-subj", subject, "-keyout", self.folder / f"{name}.key", "-out", request)
        signer = ("-CA", self.folder / f"{authority}.crt", "-CAkey", self.folder / f"{authority}.key", "-CAcreateserial")
        target = ("-out", self.folder / f"{name}.crt", "-extfile", extensions)
        run("openssl", "x509", "-req", "-in", request, *signer, "-days", "365", *target)
        request.unlink()
        extensions.unlink()
