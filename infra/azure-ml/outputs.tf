output "endpoint_id" {
  description = "The endpoint's resource id."
  value       = azapi_resource.endpoint.id
}

output "principal_id" {
  description = "The endpoint's identity. Give it AcrPull on the registry and Storage Blob Data Reader on the models."
  value       = azapi_resource.endpoint.identity[0].principal_id
}

output "registry" {
  description = "The registry made here, to push the image to; null with a workspace of your own."
  value       = one(azurerm_container_registry.this[*].login_server)
}

output "scoring_uri" {
  description = "The endpoint's address. V2's paths are below it, and /score asks the one model."
  value       = local.scoring_uri
}

output "deployment_ids" {
  description = "The resource ids of the deployments, by name."
  value       = { for name, each in azapi_resource.deployment : name => each.id }
}

output "model_versions" {
  description = "The version of the model that each deployment serves."
  value       = local.versions
}

output "invoke" {
  description = "A command that asks the endpoint, with a token of the caller's own identity. `az ml online-endpoint invoke` posts to the bare address, which is /score."
  value       = "curl '${trimsuffix(local.scoring_uri, "/")}/score' --json @request.json -H \"Authorization: Bearer $(az account get-access-token --resource https://ml.azure.com --query accessToken --output tsv)\""
}

locals {
  scoring_uri = try(azapi_resource.endpoint.output.properties.scoringUri, "https://${var.name}.${lower(replace(var.location, " ", ""))}.inference.ml.azure.com/")
}
