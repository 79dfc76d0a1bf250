output "endpoint_name" {
  description = "The endpoint to invoke."
  value       = var.name
  depends_on  = [aws_sagemaker_endpoint.this, aws_cloudformation_stack.component]
}

output "inference_component_name" {
  description = "What to name as InferenceComponentName when invoking; null but for scale-to-zero."
  value       = local.component ? var.name : null
}

output "repository_url" {
  description = "Where to push the image; null when no repository is made here."
  value       = one(aws_ecr_repository.this[*].repository_url)
}

output "role_arn" {
  description = "The role that the endpoint runs as."
  value       = aws_iam_role.endpoint.arn
}

output "alarm_names" {
  description = "The alarms, of which a rollout takes notice."
  value       = [for alarm in aws_cloudwatch_metric_alarm.endpoint : alarm.alarm_name]
}

output "invoke" {
  description = "A command that asks the endpoint."
  value = (
    var.mode == "async"
    ? "aws sagemaker-runtime invoke-endpoint-async --endpoint-name ${var.name} --input-location s3://BUCKET/request.json"
    : "aws sagemaker-runtime invoke-endpoint --endpoint-name ${var.name}${local.component ? " --inference-component-name ${var.name}" : ""} --body fileb://request.json --content-type application/json /dev/stdout"
  )
}
