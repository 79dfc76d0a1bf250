output "url" {
  description = "Where the service answers V2 requests; callers bring an identity token."
  value       = google_cloud_run_v2_service.this.uri
}

output "service_account" {
  description = "The account that the service runs as."
  value       = local.account
}

output "service_name" {
  description = "The service's name, for `gcloud run services logs read`."
  value       = google_cloud_run_v2_service.this.name
}

output "invoke" {
  description = "A command that asks whether the service is ready."
  value       = "curl \"${google_cloud_run_v2_service.this.uri}/v2/health/ready\" -H \"Authorization: Bearer $(gcloud auth print-identity-token)\""
}
