output "function_name" {
  description = "The function to invoke; with kept_warm, invoke its alias `live`."
  value       = aws_lambda_function.this.function_name
}

output "function_url" {
  description = "Where the function answers V2 requests signed for AWS; null without function_url."
  value       = one(aws_lambda_function_url.this[*].function_url)
}
