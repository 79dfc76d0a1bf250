#!/bin/sh
# Install Knative Serving (by Kourier) and KServe into the cluster that kubectl points at, for services with GPUs.
#
# usage: install.sh            install, or bring an earlier installation up to date
#        install.sh --check    change nothing, list what a service would miss, and exit with 1 if that is anything
#
# DOMAIN=example.com           the domain of the services' addresses, whose DNS record *.example.com you point at Kourier.
#                              Without it addresses are below sslip.io, which needs a load balancer with an IP address:
#                              EKS gives a host name, so that DOMAIN is needed there.
# KNATIVE, KSERVE, CERT_MANAGER, DEVICE_PLUGIN
#                              other releases. DEVICE_PLUGIN=none installs no device plugin (GKE brings its own).
# FROM=DIR                     take the releases' files from DIR (no network): their names, in one folder
set -eu

KNATIVE=${KNATIVE:-1.21.2}
KSERVE=${KSERVE:-0.16.0}
CERT_MANAGER=${CERT_MANAGER:-1.17.0}
DEVICE_PLUGIN=${DEVICE_PLUGIN:-0.17.1}
# The oldest minor version of Kubernetes 1 that the Knative release above runs on.
OLDEST=33

# -- what a cluster has: each succeeds or fails, and changes nothing ---------------------------------------------------

version() { kubectl get --raw /version; }
minor() { version | sed -n 's/.*"minor": *"\([0-9]*\).*/\1/p'; }
new_enough() { [ "$(minor)" -ge "$OLDEST" ]; }
has_crd() { kubectl get crd "$1" >/dev/null 2>&1; }
runs() { kubectl wait --for=condition=Available deployment --all --namespace "$1" --timeout="${2:-1s}" >/dev/null 2>&1; }
setting() { kubectl get configmap "$2" --namespace "$1" -o jsonpath="{.data.$3}" 2>/dev/null; }
by_kourier() { [ "$(setting knative-serving config-network ingress-class)" = kourier.ingress.networking.knative.dev ]; }
allowed() { [ "$(setting knative-serving config-features "kubernetes\.podspec-$1")" = enabled ]; }
# The settings of an untouched cluster have one key, _example.
has_domain() {
    kubectl get configmap config-domain --namespace knative-serving -o go-template='{{range $name, $_ := .data}}{{$name}} {{end}}' |
        tr ' ' '\n' | grep -v '^_example$' | grep -q .
}
without_istio() { setting kserve inferenceservice-config ingress | grep -q '"disableIstioVirtualHost": *true'; }
has_address() { kubectl get service kourier --namespace kourier-system -o jsonpath='{.status.loadBalancer.ingress}' 2>/dev/null | grep -q .; }
on_gke() { version | grep -q gke; }
has_device_plugin() { on_gke || kubectl get daemonset --all-namespaces -o name 2>/dev/null | grep -q nvidia-device-plugin; }

# -- the check ---------------------------------------------------------------------------------------------------------

missing=0
# check NAME CURE COMMAND...
check() {
    name=$1 cure=$2
    shift 2
    if "$@"; then echo "ok       $name"; else
        echo "missing  $name: $cure"
        missing=$((missing + 1))
    fi
}

if [ "${1:-}" = --check ]; then
    version >/dev/null || { echo "kubectl reaches no cluster" >&2; exit 1; }
    again="run install.sh"
    check "Kubernetes 1.$OLDEST or newer" "upgrade the cluster, or choose older releases by KNATIVE and KSERVE" new_enough
    check "Knative Serving's definitions" "$again" has_crd services.serving.knative.dev
    check "Knative Serving" "kubectl get pods --namespace knative-serving" runs knative-serving
    check "Kourier" "kubectl get pods --namespace kourier-system" runs kourier-system
    check "Kourier is Knative's ingress" "$again" by_kourier
    check "Kourier has an address" "kubectl describe service kourier --namespace kourier-system" has_address
    check "a domain for addresses" "run install.sh with DOMAIN=..." has_domain
    for field in nodeselector tolerations persistent-volume-claim; do
        check "services may use $field" "$again" allowed "$field"
    done
    check "cert-manager" "kubectl get pods --namespace cert-manager" runs cert-manager
    check "KServe's definitions" "$again" has_crd inferenceservices.serving.kserve.io
    check "KServe" "kubectl get pods --namespace kserve" runs kserve
    check "KServe without Istio" "$again" without_istio
    check "NVIDIA's device plugin" "run install.sh without DEVICE_PLUGIN=none" has_device_plugin
    [ "$missing" = 0 ]
    exit
fi
[ $# = 0 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# -- the installation --------------------------------------------------------------------------------------------------

# apply URL: from the release, or the file of that name in $FROM.
apply() {
    if [ -n "${FROM:-}" ]; then set -- "$FROM/$(basename "$1")"; fi
    kubectl apply --server-side --force-conflicts -f "$1"
}
fail() { echo "install.sh: $*" >&2; exit 1; }
# An object of a kind that the API server does not know yet is refused.
established() { kubectl wait --for=condition=Established crd "$@" --timeout=120s; }
ready() { runs "$1" 300s || fail "the deployments of $1 do not get ready: kubectl get pods --namespace $1"; }
patch() { kubectl patch configmap "$1" --namespace knative-serving --type merge --patch "$2"; }

new_enough || fail "the cluster has Kubernetes 1.$(minor), and Knative $KNATIVE needs 1.$OLDEST: upgrade it, or choose older releases"

releases=https://github.com
serving=$releases/knative/serving/releases/download/knative-v$KNATIVE
apply "$serving/serving-crds.yaml"
established services.serving.knative.dev configurations.serving.knative.dev revisions.serving.knative.dev routes.serving.knative.dev
apply "$serving/serving-core.yaml"
apply "$releases/knative-extensions/net-kourier/releases/download/knative-v$KNATIVE/kourier.yaml"
patch config-network '{"data": {"ingress-class": "kourier.ingress.networking.knative.dev"}}'
# Off unless asked for: a GPU service selects its nodes and tolerates their taint, models may lie on a volume.
patch config-features '{"data": {"kubernetes.podspec-nodeselector": "enabled", "kubernetes.podspec-tolerations": "enabled", "kubernetes.podspec-persistent-volume-claim": "enabled"}}'
# A GPU node takes minutes to come, and an image with CUDA minutes to arrive.
patch config-deployment '{"data": {"progress-deadline": "900s"}}'
ready knative-serving
ready kourier-system

# Without a domain services are called NAME.NAMESPACE.svc.cluster.local, which has no route from outside.
if [ -n "${DOMAIN:-}" ]; then
    patch config-domain "{\"data\": {\"$DOMAIN\": \"\"}}"
elif ! has_domain; then
    apply "$serving/serving-default-domain.yaml"
    kubectl wait --for=condition=Complete job/default-domain --namespace knative-serving --timeout=300s ||
        fail "no domain: the load balancer of Kourier has no IP address. Run install.sh with DOMAIN=..."
fi

apply "$releases/cert-manager/cert-manager/releases/download/v$CERT_MANAGER/cert-manager.yaml"
established certificates.cert-manager.io issuers.cert-manager.io
ready cert-manager
kserve=$releases/kserve/kserve/releases/download/v$KSERVE
apply "$kserve/kserve.yaml"
established inferenceservices.serving.kserve.io servingruntimes.serving.kserve.io clusterservingruntimes.serving.kserve.io
# By default KServe makes an Istio VirtualService for each service, and waits for it for ever where there is no Istio.
if ! without_istio; then
    kubectl get configmap inferenceservice-config --namespace kserve -o json |
        sed 's/\(disableIstioVirtualHost\\": *\)false/\1true/' | kubectl replace -f -
    without_istio || fail "KServe's settings have no disableIstioVirtualHost: kubectl edit configmap inferenceservice-config --namespace kserve"
    kubectl rollout restart deployment kserve-controller-manager --namespace kserve
fi
ready kserve
apply "$kserve/kserve-cluster-resources.yaml"

if [ "$DEVICE_PLUGIN" != none ] && ! has_device_plugin; then
    apply "https://raw.githubusercontent.com/NVIDIA/k8s-device-plugin/v$DEVICE_PLUGIN/deployments/static/nvidia-device-plugin.yml"
fi
