#!/bin/sh
# Puts Knative Serving and KServe into the cluster that kubectl points at, and allows what a GPU service needs.
#
# usage: install.sh            KNATIVE, KSERVE and CERT_MANAGER choose other releases
#        FROM=DIR install.sh   takes the releases' files from DIR (no network): the names below, in one folder
set -eu

KNATIVE=${KNATIVE:-1.21.0}
KSERVE=${KSERVE:-0.15.0}
CERT_MANAGER=${CERT_MANAGER:-1.17.0}

# apply URL: from the release, or the file of that name in $FROM.
apply() {
    if [ -n "${FROM:-}" ]; then set -- "$FROM/$(basename "$1")"; fi
    kubectl apply --server-side --force-conflicts -f "$1"
}
ready() { kubectl wait --for=condition=Available deployment --all --namespace "$1" --timeout=300s; }
patch() { kubectl patch configmap "$1" --namespace knative-serving --type merge --patch "$2"; }

releases=https://github.com
serving=$releases/knative/serving/releases/download/knative-v$KNATIVE
apply "$serving/serving-crds.yaml"
apply "$serving/serving-core.yaml"
apply "$releases/knative-extensions/net-kourier/releases/download/knative-v$KNATIVE/kourier.yaml"
patch config-network '{"data": {"ingress-class": "kourier.ingress.networking.knative.dev"}}'
# Off unless asked for: a GPU service selects its nodes and tolerates their taint, models may lie on a volume.
patch config-features '{"data": {"kubernetes.podspec-nodeselector": "enabled", "kubernetes.podspec-tolerations": "enabled", "kubernetes.podspec-persistent-volume-claim": "enabled"}}'
# A GPU node takes minutes to come, and an image with CUDA minutes to arrive.
patch config-deployment '{"data": {"progress-deadline": "900s"}}'
ready knative-serving

apply "$releases/cert-manager/cert-manager/releases/download/v$CERT_MANAGER/cert-manager.yaml"
ready cert-manager
kserve=$releases/kserve/kserve/releases/download/v$KSERVE
apply "$kserve/kserve.yaml"
ready kserve
apply "$kserve/kserve-cluster-resources.yaml"
