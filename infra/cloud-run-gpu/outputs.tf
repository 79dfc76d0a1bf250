output "url" {
  description = "Where the service answers V2 requests; callers bring an identity token."
  value       = google_cloud_run_v2_service.this.uri
}

output "service_account" {
  description = "The account that the service runs as."
  value       = google_service_account.this.email
}
