-- Enqueues. Of each queue: how many jobs, how many runs. A run: how many, priority, run-after in
-- ms, attempts, status; then bodies, in a lean queue what plb_ holds. The result: the id of the
-- first job; the others follow.

local enqueues = each_op(function(queue)
  local jobs, runs = take_number(), take_number()
  local counter, prefix, lean = counter_key(queue), job_key(queue, ''), is_lean(queue)
  local number = redis.call('INCRBY', counter, jobs) - jobs
  if number == 0 then -- it was evicted
    number = unused_id(now)
    redis.call('SET', counter, id_text(number + jobs))
  end
  local first = number + 1
  for _ = 1, runs do
    local count, priority, run_after = take_number(), take(), take()
    local attempts, status = take(), take()
    local scores, score, records = {}, scorer(tonumber(run_after)), {}
    for at = 1, count do
      number = number + 1
      local id, body = id_text(number), ARGV[taken + at]
      scores[2 * at - 1], scores[2 * at] = score[#id], id
      if lean then
        records[2 * at - 1], records[2 * at] = id, body
      else
        redis.call(
          'HSET', prefix .. id, 'bd', body, 'cs', status, 'ca', now_seconds, 'ua', now_seconds,
          'al', attempts, 'ar', attempts, 'ra', run_after
        )
      end
    end
    taken = taken + count
    call_with_all('HSET', jobs_key(queue), records)
    add_all(set_key(queue, priority, PENDING), scores)
  end
  return first
end)
