output "function_name" {
  description = "The function to invoke; with kept_warm, invoke its alias `live`."
  value       = aws_lambda_function.this.function_name
}

output "function_url" {
  description = "Where the function answers V2 requests signed for AWS; null without function_url."
  value       = one(aws_lambda_function_url.this[*].function_url)
}

output "function_arn" {
  description = "The function's ARN, for policies of callers, who need lambda:InvokeFunction and, for the URL, lambda:InvokeFunctionUrl."
  value       = aws_lambda_function.this.arn
}

output "alias_arn" {
  description = "The ARN of the alias `live`; null without kept_warm."
  value       = one(aws_lambda_alias.live[*].arn)
}

output "role_arn" {
  description = "The role that the function runs as."
  value       = local.role_arn
}

output "log_group_name" {
  description = "The function's log group."
  value       = aws_cloudwatch_log_group.this.name
}

output "invoke" {
  description = "A command that asks the function."
  value       = "aws lambda invoke --function-name ${var.name}${var.kept_warm > 0 ? ":live" : ""} --cli-binary-format raw-in-base64-out --payload file://request.json /dev/stdout"
}
