output "endpoint" {
  description = "The endpoint's full name."
  value       = google_vertex_ai_endpoint.this.id
}

output "service_account" {
  description = "The account that the replicas run as."
  value       = local.account
}

locals {
  # One model for each image and place of models, because Vertex AI refuses an id that is taken.
  model_id = "${var.name}-${substr(sha256("${var.image_uri} ${var.model_uri}"), 0, 8)}"
  host     = var.dedicated ? google_vertex_ai_endpoint.this.dedicated_endpoint_dns : "${var.region}-aiplatform.googleapis.com"
  upload = concat([
    "gcloud ai models upload --project=${var.project_id} --region=${var.region} --model-id=${local.model_id} --display-name=${var.name}",
    "--container-image-uri=${var.image_uri} --artifact-uri=${var.model_uri}",
    "--container-command=python,-m,remora_adapters.vertex",
    "--container-ports=8080 --container-health-route=/health --container-predict-route=/predict",
    ],
    # On GPUs a server that cannot use one is not ready, instead of serving by the processors.
    var.machine.accelerator == null ? [] : ["--container-env-vars=REMORA_REQUIRE_GPU=true"],
  )
  deploy = concat([
    "gcloud ai endpoints deploy-model ${var.name} --project=${var.project_id} --region=${var.region}",
    "--model=${local.model_id} --display-name=${var.name} --service-account=${local.account}",
    "--machine-type=${var.machine.type} --min-replica-count=${var.replicas.min} --max-replica-count=${var.replicas.max}",
    "--traffic-split=0=100",
    ],
    var.machine.accelerator == null ? [] : ["--accelerator=type=${lower(replace(var.machine.accelerator, "_", "-"))},count=${var.machine.accelerators}"],
  )
}

output "deploy" {
  description = "Two commands: upload the model with its container, then deploy it."
  value       = [join(" ", local.upload), join(" ", local.deploy)]
}

output "endpoint_url" {
  description = "Where requests go: a dedicated endpoint answers at its own DNS name only, and `gcloud ai endpoints predict` does not know it."
  value       = "https://${local.host}/v1/projects/${var.project_id}/locations/${var.region}/endpoints/${var.name}"
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = "curl 'https://${local.host}/v1/projects/${var.project_id}/locations/${var.region}/endpoints/${var.name}:predict' --json @request.json -H \"Authorization: Bearer $(gcloud auth print-access-token)\""
}

output "repository" {
  description = "Where to push the image."
  value       = "${var.region}-docker.pkg.dev/${var.project_id}/${google_artifact_registry_repository.images.repository_id}"
}
