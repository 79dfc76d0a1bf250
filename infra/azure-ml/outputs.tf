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

output "invoke" {
  description = "A command that asks the endpoint."
  value       = "az ml online-endpoint invoke --name ${var.name} --resource-group ${var.resource_group_name} --workspace-name ${element(split("/", local.workspace_id), -1)} --request-file request.json"
}
