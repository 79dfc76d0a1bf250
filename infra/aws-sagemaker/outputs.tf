output "endpoint_name" {
  description = "The endpoint to invoke."
  value       = var.name
  depends_on  = [aws_sagemaker_endpoint.this, aws_cloudformation_stack.component]
}

output "inference_component_name" {
  description = "What to name as InferenceComponentName when invoking; null but for scale-to-zero."
  value       = local.component ? var.name : null
}

output "inference_component_names" {
  description = "The inference components by their key in `components`, that of the module itself as `main`; empty but for scale-to-zero."
  value       = local.component ? { for key, each in local.components : key => each.name } : {}
  depends_on  = [aws_cloudformation_stack.component]
}

output "repository_url" {
  description = "Where to push the image; null when no repository is made here."
  value       = one(aws_ecr_repository.this[*].repository_url)
}

output "role_arn" {
  description = "The role that the endpoint runs as."
  value       = local.role_arn
}

output "alarm_names" {
  description = "The alarms, of which a rollout takes notice."
  value       = [for alarm in aws_cloudwatch_metric_alarm.endpoint : alarm.alarm_name]
}

output "invoke" {
  description = "A command that asks the endpoint."
  value = (
    var.mode == "async"
    ? "aws sagemaker-runtime invoke-endpoint-async --endpoint-name ${var.name} --input-location ${trimsuffix(var.async.input_uri, "/")}/request.json"
    : "aws sagemaker-runtime invoke-endpoint --endpoint-name ${var.name}${local.component ? " --inference-component-name ${var.name}" : ""}${local.multi_model ? " --target-model MODEL.tar.gz" : ""} --body fileb://request.json --content-type application/json /dev/stdout"
  )
}

output "endpoint_arn" {
  description = "The endpoint's ARN, for policies of callers."
  value       = aws_sagemaker_endpoint.this.arn
}

output "endpoint_url" {
  description = "Where signed requests go."
  value       = "https://runtime.sagemaker.${data.aws_region.current.id}.${data.aws_partition.current.dns_suffix}/endpoints/${var.name}/${var.mode == "async" ? "async-invocations" : "invocations"}"
}

output "configuration_name" {
  description = "The endpoint configuration that serves."
  value       = aws_sagemaker_endpoint.this.endpoint_config_name
}

output "model_name" {
  description = "The SageMaker model of the current release."
  value       = aws_sagemaker_model.this[local.model_name].name
}

output "releases" {
  description = "The releases that are kept, the current one first: the value of `previous` for the next apply that changes image, models or environment."
  value       = slice(concat([local.current], var.previous), 0, min(3, 1 + length(var.previous)))
}

output "log_group_name" {
  description = "The log group of the endpoint's containers."
  value       = "/aws/sagemaker/Endpoints/${var.name}"
}

output "alarm_arns" {
  description = "The ARNs of the alarms."
  value       = [for alarm in aws_cloudwatch_metric_alarm.endpoint : alarm.arn]
}
