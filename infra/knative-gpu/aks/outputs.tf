output "node_selector" {
  description = "What pods select these nodes by."
  value       = { "remora.dev/pool" = var.name }
}

output "toleration" {
  description = "What pods have to tolerate."
  value       = { key = "nvidia.com/gpu", operator = "Exists", effect = "NoSchedule" }
}
