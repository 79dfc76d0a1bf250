output "endpoint" {
  description = "The endpoint's full name."
  value       = google_vertex_ai_endpoint.this.id
}

output "service_account" {
  description = "The account that the replicas run as."
  value       = google_service_account.this.email
}

locals {
  upload = [
    "gcloud ai models upload --project=${var.project_id} --region=${var.region} --display-name=${var.name}",
    "--container-image-uri=${var.image_uri} --artifact-uri=${var.model_uri}",
    "--container-command=python,-m,remora_adapters.vertex",
    "--container-ports=8080 --container-health-route=/health --container-predict-route=/predict",
  ]
  deploy = concat([
    "gcloud ai endpoints deploy-model ${var.name} --project=${var.project_id} --region=${var.region}",
    "--model=MODEL_ID --display-name=${var.name} --service-account=${google_service_account.this.email}",
    "--machine-type=${var.machine.type} --min-replica-count=${var.replicas.min} --max-replica-count=${var.replicas.max}",
    "--traffic-split=0=100",
    ],
    var.machine.accelerator == null ? [] : ["--accelerator=type=${lower(replace(var.machine.accelerator, "_", "-"))},count=${var.machine.accelerators}"],
  )
}

output "deploy" {
  description = "Two commands: upload the model with its container, then deploy it under the id that the first prints."
  value       = [join(" ", local.upload), join(" ", local.deploy)]
}
