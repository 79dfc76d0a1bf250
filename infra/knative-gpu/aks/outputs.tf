output "node_selector" {
  description = "What pods select these nodes by."
  value       = { "remora.dev/pool" = var.name }
}

output "toleration" {
  description = "What pods have to tolerate."
  value       = { key = "nvidia.com/gpu", operator = "Exists", effect = "NoSchedule" }
}

output "spot_toleration" {
  description = "What pods have to tolerate besides, on spot nodes; null elsewhere. The manifests of infra/kubernetes do not."
  value       = var.spot ? { key = "kubernetes.azure.com/scalesetpriority", operator = "Equal", value = "spot", effect = "NoSchedule" } : null
}
