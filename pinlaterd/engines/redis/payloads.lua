-- What claims would hand out. Arguments: the shard, queue, priority, most bytes, ids. Returns OK,
-- then for each id a table of body, attempts allowed and remaining, or 0 if it is not PENDING, or
-- -1 if it was evicted. Ends before the body with which all would have more than those bytes.

local queue, priority, most_bytes = take(), take(), take_number()
local set = set_key(queue, priority, PENDING)
local found = { 'OK' }
while taken < #ARGV do
  local id = take()
  if not score_in(set, id) then
    found[#found + 1] = 0
  else
    local fields = job_fields(queue, id, 'al', 'ar', 'bd')
    if not fields then
      found[#found + 1] = -1
    else
      local body = fields[3] or ''
      most_bytes = most_bytes - #body
      if most_bytes < 0 and #found > 1 then
        break
      end
      found[#found + 1] = { body, fields[1], fields[2] }
    end
  end
end
return found
